"""Sizes follow measured speed, add up to what they were, and change only for a reason."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols.rules.balance import MEASUREMENTS, TOLERANCE, Balancer, in_proportion, rounded, told

seconds = st.floats(1e-6, 1e3)
batches = st.integers(1, 64)
paces = st.lists(seconds, min_size=1, max_size=8)
"""Seconds per sample of each worker."""


def crew(batch: int, workers: int) -> Balancer:
    balancer = Balancer(batch)
    for worker in range(workers):
        balancer.join(worker)
    return balancer


def work(balancer: Balancer, pace: list[float] | dict[int, float], rounds: int = MEASUREMENTS) -> None:
    """Everybody present computes its batch, so many times."""
    known = pace if isinstance(pace, dict) else dict(enumerate(pace))
    for _ in range(rounds):
        for worker, size in dict(balancer.sizes).items():
            balancer.measured(worker, size, size * known[worker])


def assert_sound(balancer: Balancer) -> None:
    sizes = balancer.sizes
    assert sum(sizes.values()) == balancer.batch * len(sizes)
    assert all(size >= 1 for size in sizes.values())


@given(batch=batches, pace=paces)
def test_sizes_are_in_proportion_to_speed_within_rounding_and_add_up(batch: int, pace: list[float]) -> None:
    shares = in_proportion(batch * len(pace), {rank: 1 / each for rank, each in enumerate(pace)})
    sizes = rounded(shares, batch * len(pace))
    assert sum(sizes.values()) == batch * len(pace)
    assert all(sizes[rank] >= 1 and abs(sizes[rank] - shares[rank]) < 1 for rank in sizes)
    above = [rank for rank in shares if shares[rank] > 1]
    per_speed = [shares[rank] * pace[rank] for rank in above]
    assert per_speed == pytest.approx(per_speed[:1] * len(per_speed), rel=1e-9)


@given(batch=batches, pace=paces, later=paces)
def test_the_sum_is_kept_and_nobody_gets_nothing_whatever_is_measured(
    batch: int, pace: list[float], later: list[float]
) -> None:
    balancer = crew(batch, len(pace))
    for each in (pace, [*later, *pace][: len(pace)], pace):
        work(balancer, each)
        assert_sound(balancer)


@given(batch=batches, pace=paces)
def test_what_does_not_change_is_settled_once(batch: int, pace: list[float]) -> None:
    balancer = crew(batch, len(pace))
    work(balancer, pace)
    sizes, revision = dict(balancer.sizes), balancer.revision
    work(balancer, pace, 4 * MEASUREMENTS)
    assert (dict(balancer.sizes), balancer.revision) == (sizes, revision)


@given(
    pace=st.lists(st.floats(1, 9), min_size=2, max_size=6),
    wobble=st.lists(st.floats(-1, 1), min_size=6, max_size=6),
)
def test_speeds_that_would_move_no_share_by_a_tenth_change_nothing(
    pace: list[float], wobble: list[float]
) -> None:
    """A wobble of w in every speed moves a share by at most (1 + w) / (1 - w) - 1."""
    balancer = crew(1000, len(pace))
    work(balancer, pace)
    sizes = dict(balancer.sizes)
    most = TOLERANCE / 3
    work(balancer, [each * (1 + most * shift) for each, shift in zip(pace, wobble, strict=False)])
    assert dict(balancer.sizes) == sizes


def test_a_share_that_moves_by_more_than_a_tenth_changes_the_sizes() -> None:
    balancer = crew(100, 2)
    work(balancer, [1.0, 1.15])  # shares of 107 and 93
    assert dict(balancer.sizes) == {0: 100, 1: 100}
    work(balancer, [1.0, 1.25])  # 111 and 89
    assert dict(balancer.sizes) == {0: 111, 1: 89}


def test_nothing_changes_before_everybody_has_been_measured_a_few_times() -> None:
    balancer = crew(10, 3)
    for _ in range(10 * MEASUREMENTS):
        balancer.measured(0, 10, 1.0)
        balancer.measured(1, 10, 1.0)
    for _ in range(MEASUREMENTS - 1):
        balancer.measured(2, 10, 4.0)
    assert dict(balancer.sizes) == {0: 10, 1: 10, 2: 10}
    balancer.measured(2, 10, 4.0)
    assert dict(balancer.sizes) == {0: 14, 1: 13, 2: 3}


def test_the_median_forgives_a_slow_start() -> None:
    balancer = crew(10, 2)
    balancer.measured(0, 10, 500.0)
    balancer.measured(1, 10, 1.0)
    work(balancer, [0.1, 0.1], MEASUREMENTS - 1)
    assert dict(balancer.sizes) == {0: 10, 1: 10}
    assert balancer.revision == 0


@pytest.mark.parametrize("compute_s", [0.0, -1.0, nan, inf, 5e-324])
def test_times_that_are_none_are_not_counted(compute_s: float) -> None:
    balancer = crew(10, 2)
    for _ in range(3 * MEASUREMENTS):
        balancer.measured(0, 10, compute_s)
        balancer.measured(1, 10, 1.0)
    assert dict(balancer.sizes) == {0: 10, 1: 10}
    work(balancer, [1.0, 4.0])
    assert dict(balancer.sizes) == {0: 16, 1: 4}


def test_pushes_without_samples_and_of_strangers_are_not_counted() -> None:
    balancer = crew(10, 2)
    for _ in range(MEASUREMENTS):
        balancer.measured(0, 0, 1.0)
        balancer.measured(7, 10, 1.0)
    work(balancer, [1.0, 4.0], MEASUREMENTS - 1)
    assert dict(balancer.sizes) == {0: 10, 1: 10}


def test_a_time_that_hardly_depends_on_the_batch_still_comes_to_rest_at_equal_times() -> None:
    """Each needs a second for anything at all; then every sample costs rank 1 four times as much."""
    balancer = crew(100, 2)

    def times() -> dict[int, float]:
        return {0: 1 + 0.02 * balancer.size(0), 1: 1 + 0.08 * balancer.size(1)}

    for _ in range(20 * MEASUREMENTS):
        for rank, took in times().items():
            balancer.measured(rank, balancer.size(rank), took)
    assert times()[0] == pytest.approx(times()[1], rel=0.1)
    assert_sound(balancer)


def test_the_survivors_of_a_death_share_their_own_sum_by_the_speeds_known() -> None:
    balancer = crew(10, 4)
    work(balancer, [1.0, 1.0, 1.0, 2.5])
    assert dict(balancer.sizes) == {0: 12, 1: 12, 2: 12, 3: 4}
    balancer.leave(0)
    assert dict(balancer.sizes) == {1: 13, 2: 12, 3: 5}
    assert_sound(balancer)


def test_a_newcomer_gets_the_loaders_batch_until_it_is_known() -> None:
    balancer = crew(10, 2)
    work(balancer, [1.0, 4.0])
    balancer.join(5)
    assert dict(balancer.sizes) == {0: 16, 1: 4, 5: 10}
    work(balancer, {0: 1.0, 1: 4.0, 5: 1.0})
    assert dict(balancer.sizes) == {0: 14, 1: 3, 5: 13}


def test_who_joins_again_without_having_left_keeps_its_size() -> None:
    balancer = crew(10, 2)
    work(balancer, [1.0, 4.0])
    balancer.join(1)
    assert dict(balancer.sizes) == {0: 16, 1: 4}


def test_a_death_ends_the_wait_for_the_measurements_of_the_dead() -> None:
    balancer = crew(10, 3)
    for _ in range(MEASUREMENTS):
        balancer.measured(0, 10, 1.0)
        balancer.measured(1, 10, 4.0)
    balancer.leave(2)
    balancer.measured(0, 10, 1.0)
    assert dict(balancer.sizes) == {0: 16, 1: 4}


@given(
    batch=batches,
    schedule=st.lists(
        st.tuples(st.sampled_from(["join", "leave", "push", "push"]), st.integers(0, 5), seconds)
    ),
)
def test_the_sum_is_kept_whoever_comes_and_goes(batch: int, schedule: list[tuple[str, int, float]]) -> None:
    balancer = crew(batch, 3)
    for action, rank, compute_s in schedule:
        if action == "join":
            balancer.join(rank)
        elif action == "leave":
            balancer.leave(rank)
        else:
            balancer.measured(rank, balancer.size(rank), compute_s)
        assert_sound(balancer)


def test_speeds_go_on_after_a_resume_also_with_other_workers() -> None:
    balancer = crew(10, 2)
    work(balancer, [1.0, 4.0])
    resumed = Balancer(10)
    resumed.load(balancer.state())
    for rank in range(3):
        resumed.join(rank)
    assert dict(resumed.sizes) == {0: 16, 1: 4, 2: 10}


def test_a_note_names_every_rank_while_they_are_few() -> None:
    assert told({2: 3, 0: 9}) == "balanced: batches of 9 (rank 0), 3 (rank 2) samples from now on"
    assert told({rank: 5 + rank for rank in range(40)}) == "balanced: batches of 5 to 44 samples from now on"


def test_the_median_is_between_the_fast_and_the_slow_measurements() -> None:
    balancer = crew(10, 2)
    for seconds in (10.0, 10.0, 30.0, 90.0, 90.0):
        balancer.measured(0, 10, seconds)
        balancer.measured(1, 10, 10.0)
    assert dict(balancer.sizes) == {0: 5, 1: 15}


def test_a_share_between_one_and_two_is_kept() -> None:
    assert in_proportion(10, {0: 8.5, 1: 1.5}) == {0: 8.5, 1: 1.5}
    assert in_proportion(10, {0: 9.5, 1: 0.5}) == {0: 9.0, 1: 1.0}
