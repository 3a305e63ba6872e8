"""DSSP's controller: what it grants, when it is asked, and how many iterations a grant starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocols import Pacer
from paceline.protocols.paced.dssp import DSSP, Preset, best_grant
from support.drive import Schedule, drive
from support.reference_dssp import nearest_stop
from support.schedules import schedules

eighths = st.integers(0, 160).map(lambda n: n / 8)
presets = pytest.mark.parametrize("preset", ["bounded", "bounded_eager", "figure2", "printed"])


@pytest.mark.parametrize(
    ("p", "s", "most", "limit", "granted"),
    [
        ((10.0, 9.0), (9.5, 7.0), 12, 12, 2),
        ((10.0, 9.0), (9.9, 6.5), 12, 12, 10),
        ((10.0, 9.0), (9.9, 6.5), 4, 4, 3),
        ((10.0, 9.0), (9.9, 6.5), 12, 5, 3),
        ((10.0, 9.0), (10.0, 9.0), 12, 12, 1),
        ((10.0, 9.0), (-20.0, -21.0), 12, 12, 0),
    ],
    ids=["tie-to-the-fewest", "late-but-nearest", "figure-2", "hard-bound", "equal", "long-overdue"],
)
def test_grants_what_the_worked_examples_say(
    p: tuple[float, float], s: tuple[float, float], most: int, limit: int, granted: int
) -> None:
    (last_p, before_p), (last_s, before_s) = p, s
    interval_s = last_s - before_s
    assert best_grant(last_p, last_p - before_p, last_s + interval_s, interval_s, most, limit) == granted


@settings(max_examples=400)
@given(
    last_p=eighths,
    interval_p=eighths,
    next_s=st.integers(-80, 320).map(lambda n: n / 8),
    interval_s=eighths,
    most=st.integers(0, 12),
    data=st.data(),
)
def test_grants_the_best_of_all_pairs_of_stops_and_ties_go_to_the_fewest(
    last_p: float, interval_p: float, next_s: float, interval_s: float, most: int, data: st.DataObject
) -> None:
    limit = data.draw(st.integers(0, most))
    arguments = (last_p, interval_p, next_s, interval_s, most, limit)
    assert best_grant(*arguments) == nearest_stop(*arguments)


@contextmanager
def asked() -> Iterator[list[tuple[int, int, int]]]:
    """Collects (most, limit, granted) of every question to the controller."""
    calls: list[tuple[int, int, int]] = []

    def spy(last_p: float, interval_p: float, next_s: float, interval_s: float, most: int, limit: int) -> int:
        granted = best_grant(last_p, interval_p, next_s, interval_s, most, limit)
        calls.append((most, limit, granted))
        return granted

    with patch("paceline.protocols.paced.dssp.best_grant", spy):
        yield calls


@presets
@given(schedule=schedules(iterations=20))
def test_is_asked_only_for_a_fastest_worker_beyond_lower_whose_grant_is_spent(
    preset: Preset, schedule: Schedule
) -> None:
    protocol = DSSP(lower=1, upper=4, preset=preset)
    left: dict[int, int] = {}
    with asked() as calls:
        for step in drive(protocol, schedule):
            if calls:
                assert step.event == "push"
                assert step.gap(step.worker) > 1
                assert step.after[step.worker] == max(step.after.values())
                assert left.get(step.worker, 0) == 0
                assert len(calls) == 1
            calls.clear()
            left = dict(protocol.grants)


@presets
@given(schedule=schedules(iterations=20))
def test_grants_between_zero_and_the_width_of_the_range(preset: Preset, schedule: Schedule) -> None:
    with asked() as calls:
        for step in drive(DSSP(lower=1, upper=5, preset=preset), schedule):
            for most, limit, granted in calls:
                assert 0 <= granted <= limit <= most == 4
                if preset in ("bounded", "bounded_eager"):
                    assert granted <= 5 - step.gap(step.worker) + 1
            calls.clear()


@presets
def test_is_never_asked_while_nobody_passes_lower(preset: Preset) -> None:
    with asked() as calls:
        for _ in drive(DSSP(lower=99, upper=120, preset=preset), Schedule(speeds=(1, 9), iterations=20)):
            pass
    assert calls == []


@presets
def test_is_never_asked_before_both_intervals_are_known(preset: Preset) -> None:
    with asked() as calls:
        pacer = Pacer(DSSP(lower=0, upper=9, preset=preset))
        pacer.join(0, 0.0)
        pacer.join(1, 0.0)
        for now in (1.0, 2.0):  # two pushes each: only then is there an interval
            assert pacer.push(0, now).release == ()
            assert set(pacer.push(1, now + 0.5).release) == {0, 1}
        assert calls == []
        pacer.push(0, 3.0)
        assert len(calls) == 1


@pytest.mark.parametrize("granted", [1, 2, 5])
@pytest.mark.parametrize(
    ("preset", "more"), [("bounded", 0), ("bounded_eager", 0), ("figure2", 0), ("printed", 1)]
)
def test_a_grant_of_x_starts_exactly_x_iterations_and_one_more_as_printed(
    preset: Preset, more: int, granted: int
) -> None:
    pacer = with_known_intervals(DSSP(lower=1, upper=7, preset=preset))
    with patch("paceline.protocols.paced.dssp.best_grant", side_effect=[granted, 0, 0]):
        assert pacer.push(0, 2.5).release == (0,)  # one ahead: within lower
        started = [pacer.push(0, 3.0 + n).release for n in range(granted + more + 1)]
    assert started == [(0,)] * (granted + more) + [()]


@presets
def test_a_grant_of_nothing_starts_nothing(preset: Preset) -> None:
    pacer = with_known_intervals(DSSP(lower=1, upper=7, preset=preset))
    with patch("paceline.protocols.paced.dssp.best_grant", return_value=0):
        assert pacer.push(0, 2.5).release == (0,)
        assert pacer.push(0, 3.0).release == ()


def test_a_grant_is_spent_even_while_its_worker_is_back_within_lower() -> None:
    pacer = with_known_intervals(DSSP(lower=1, upper=9))
    with patch("paceline.protocols.paced.dssp.best_grant", side_effect=[3, 0]):
        pacer.push(0, 2.5)
        assert pacer.push(0, 3.0).release == (0,)  # two ahead: granted three, the first begins
        pacer.push(1, 3.2)
        pacer.push(1, 3.4)
        assert pacer.push(0, 3.6).release == (0,)  # one ahead, within lower, yet the second
        assert pacer.push(0, 3.8).release == (0,)  # two ahead: the third
        assert pacer.push(0, 4.0).release == ()  # asked again, granted nothing


def with_known_intervals(protocol: DSSP) -> Pacer:
    """Two workers that have completed two iterations each, so that their intervals are known."""
    pacer = Pacer(protocol)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    for now in (1.0, 2.0):
        pacer.push(0, now)
        pacer.push(1, now)
    return pacer
