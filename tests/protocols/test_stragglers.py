"""Who counts as slow, since when, and until when."""

from __future__ import annotations

from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols.rules.stragglers import Stragglers, suspects

speeds = st.dictionaries(st.integers(0, 20), st.floats(0.01, 100.0), min_size=1)


def windows(watch: Stragglers, *rows: list[float]) -> list[list[int]]:
    """What each window shows, given the seconds each worker took in it."""
    seen = []
    for row in rows:
        for worker, seconds in enumerate(row):
            watch.timed(worker, seconds)
        seen.append(watch.look(range(len(row))))
    return seen


@given(count=st.integers(1, 50), speed=st.floats(1e-6, 1e6), slower=st.sampled_from([0.01, 0.1, 0.5]))
def test_nobody_of_equal_speed_is_suspect(count: int, speed: float, slower: float) -> None:
    assert suspects(dict.fromkeys(range(count), speed), slower) == set()


@given(speeds=speeds)
def test_a_suspect_is_a_tenth_below_the_mean_and_never_the_fastest(speeds: dict[int, float]) -> None:
    found = suspects(speeds, 0.1)
    mean = sum(speeds.values()) / len(speeds)
    assert all(speeds[worker] <= 0.9 * mean * (1 + 1e-6) for worker in found)
    assert max(speeds.values()) not in {speeds[worker] for worker in found}


@given(speeds=speeds)
def test_who_is_slower_than_a_suspect_is_suspect(speeds: dict[int, float]) -> None:
    found = suspects(speeds, 0.1)
    slowest_cleared = min((v for w, v in speeds.items() if w not in found), default=float("inf"))
    assert all(speeds[worker] < slowest_cleared for worker in found)


@pytest.mark.parametrize("count", [2, 3, 8, 100])
@pytest.mark.parametrize(("speed", "suspect"), [(0.5, True), (0.95, False)])
def test_one_slow_worker_is_found_however_many_there_are(count: int, speed: float, suspect: bool) -> None:
    assert suspects(dict.fromkeys(range(1, count), 1.0) | {0: speed}, 0.1) == ({0} if suspect else set())


@pytest.mark.parametrize(("speed", "suspect"), [(0.52, False), (0.48, True)])
def test_among_workers_of_very_different_speeds_a_suspect_is_a_whole_deviation_below_the_mean(
    speed: float, suspect: bool
) -> None:
    """Speeds 0.5 and 1.5 in equal numbers: mean 1, standard deviation 0.5; `slower` alone would take 0.9."""
    many = {w: 0.5 if w % 2 else 1.5 for w in range(1000)}
    assert (1000 in suspects(many | {1000: speed}, 0.1)) is suspect


@given(speeds=speeds)
def test_a_suspect_is_a_standard_deviation_below_the_mean(speeds: dict[int, float]) -> None:
    """And whoever is clearly further below than that, and than the share, is one."""
    far = pstdev(speeds.values())
    limit = min(fmean(speeds.values()) - far, 0.9 * fmean(speeds.values()))
    found = suspects(speeds, 0.1)
    assert all(speeds[worker] <= limit + 1e-6 for worker in found)
    assert all(worker in found for worker, speed in speeds.items() if speed < limit - 1e-6)


def test_a_straggler_is_one_after_exactly_consecutive_windows_and_until_as_many_others() -> None:
    slow, fast = [1.0, 1.0, 3.0], [1.0, 1.0, 1.0]
    watch = Stragglers(consecutive=3, slower=0.1)
    assert windows(watch, slow, slow, slow) == [[], [], [2]]
    assert windows(watch, fast, fast, slow) == [[2], [2], [2]]
    assert windows(watch, fast, fast, fast) == [[2], [2], []]
    assert windows(watch, slow, slow, fast, slow, slow, slow) == [[], [], [], [], [], [2]]


def test_stragglers_come_slowest_first_and_those_who_left_are_forgotten() -> None:
    watch = Stragglers(consecutive=1, slower=0.1)
    row = [1.0, 1.0, 1.0, 1.0, 5.0, 9.0, 7.0]
    assert windows(watch, row) == [[5, 6, 4]]
    assert watch.look({0, 1, 2, 3, 6}) == [6]
    assert watch.look(range(7)) == [6]


def test_who_did_not_push_in_a_window_stays_what_it_was() -> None:
    watch = Stragglers(consecutive=1, slower=0.1)
    assert windows(watch, [1.0, 1.0, 4.0]) == [[2]]
    assert windows(watch, [1.0, 1.0]) == [[]]
    watch = Stragglers(consecutive=1, slower=0.1)
    windows(watch, [1.0, 1.0, 4.0])
    watch.timed(0, 1.0)
    watch.timed(1, 1.0)
    assert watch.look(range(3)) == [2]


def test_a_window_counts_time_not_pushes() -> None:
    watch = Stragglers(consecutive=1, slower=0.1)
    for worker, seconds in [(0, 1.0), (0, 1.0), (0, 1.0), (1, 1.0), (2, 3.0)]:
        watch.timed(worker, seconds)
    assert watch.count == 5
    assert watch.look(range(3)) == [2]
    assert watch.count == 0
