"""Links that transfers share: nothing is faster than its links, and none is idle while somebody waits."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sim.network.pipes import WEIGHTS, Pipe, Transfer, carry

RATES = st.sampled_from([1.0, 2.0, 5.0, 10.0])
SIZES = st.sampled_from([1.0, 3.0, 4.0, 10.0])
ROUTES = st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True)
BATCHES = st.lists(st.lists(st.tuples(ROUTES, SIZES), min_size=1, max_size=5), min_size=1, max_size=4)
STARTS = st.sampled_from([0.0, 0.5, 1.0, 4.0])


def carried(
    rates: list[float], batches: list[list[tuple[list[int], float]]], starts: list[float]
) -> tuple[list[Pipe], list[tuple[float, list[int], float, float]]]:
    """Pipes, and of every transfer its start, route, size and end."""
    pipes = [Pipe(rate) for rate in rates]
    seen = []
    for batch, start in zip(batches, starts, strict=False):
        ends = carry([Transfer(tuple(pipes[i] for i in route), size) for route, size in batch], start)
        seen += [(start, route, size, end) for (route, size), end in zip(batch, ends, strict=True)]
    return pipes, seen


def _bytes_over(pipe: Pipe) -> float:
    stretches = zip(pairwise(pipe._times), pipe._taken, strict=False)
    return sum(rate * (end - start) for (start, end), rate in stretches)


@given(st.lists(RATES, min_size=5, max_size=5), BATCHES, st.lists(STARTS, min_size=4, max_size=4))
def test_bytes_over_a_link_by_its_bandwidth_are_a_lower_bound_on_time(
    rates: list[float], batches: list[list[tuple[list[int], float]]], starts: list[float]
) -> None:
    _, seen = carried(rates, batches, starts)
    for number, rate in enumerate(rates):
        crossing = [(start, size, end) for start, route, size, end in seen if number in route]
        if crossing:
            first, last = min(start for start, _, _ in crossing), max(end for _, _, end in crossing)
            assert sum(size for _, size, _ in crossing) / rate <= (last - first) * (1 + 1e-6)


@given(st.lists(RATES, min_size=5, max_size=5), BATCHES, st.lists(STARTS, min_size=4, max_size=4))
def test_no_link_ever_carries_more_than_its_bandwidth_and_all_bytes_are_on_some_record(
    rates: list[float], batches: list[list[tuple[list[int], float]]], starts: list[float]
) -> None:
    pipes, seen = carried(rates, batches, starts)
    for number, (pipe, rate) in enumerate(zip(pipes, rates, strict=True)):
        assert all(-1e-6 <= each <= rate * (1 + 1e-6) for each in pipe._taken)
        assert _bytes_over(pipe) == pytest.approx(sum(size for _, route, size, _ in seen if number in route))


@given(RATES, SIZES, st.integers(1, 6), STARTS)
def test_transfers_over_one_link_take_as_long_as_one_of_the_sum_together_or_one_after_another(
    rate: float, size: float, count: int, start: float
) -> None:
    together, in_turn = Pipe(rate), Pipe(rate)
    whole = start + count * size / rate
    assert max(carry([Transfer((together,), size)] * count, start)) == pytest.approx(whole)
    ends = [carry([Transfer((in_turn,), size)], start)[0] for _ in range(count)]
    assert ends == pytest.approx([start + (n + 1) * size / rate for n in range(count)])


@given(RATES, SIZES, STARTS)
def test_an_idle_link_without_limit_adds_nothing(rate: float, size: float, start: float) -> None:
    alone = carry([Transfer((Pipe(rate),), size)], start)
    wide = Pipe(None)
    assert carry([Transfer((wide, Pipe(rate), Pipe(None)), size)], start) == alone
    assert carry([Transfer((wide, Pipe(rate)), size), Transfer((wide, Pipe(rate)), size)], start) == alone * 2


def test_a_slow_link_behind_a_shared_one_slows_only_its_own_transfer() -> None:
    shared, slow, fast = Pipe(10.0), Pipe(1.0), Pipe(10.0)
    slow_end, fast_end = carry([Transfer((shared, slow), 10.0), Transfer((shared, fast), 9.0)], 0.0)
    assert (slow_end, fast_end) == pytest.approx((10.0, 1.0))


@pytest.mark.parametrize(("count", "shares"), [(2, (0.75, 1.0)), (3, (2 / 3, 5 / 6, 1.0))])
def test_of_transfers_that_begin_together_the_first_ends_well_before_the_last(
    count: int, shares: tuple[float, ...]
) -> None:
    """On a testbed three ended at 0.58, 0.85 and 1 of the time that all took (means of eight rounds)."""
    ends = carry([Transfer((pipe,), 6.0) for pipe in [Pipe(2.0)] * count], 0.0)
    assert ends == pytest.approx([share * count * 3.0 for share in shares])


def test_what_was_asked_for_earlier_for_a_later_time_keeps_its_place_and_gaps_are_used() -> None:
    pipe = Pipe(1.0)
    assert carry([Transfer((pipe,), 2.0)], 3.0) == [5.0]
    assert carry([Transfer((pipe,), 4.0)], 0.0) == [6.0]


def test_many_alike_are_carried_as_one() -> None:
    """Ten thousand receivers of one sender: a second would be too long."""
    sender = Pipe(100.0)
    ends = carry([Transfer((sender, Pipe(10.0)), 1.0) for _ in range(10_000)], 0.0)
    assert len(set(ends)) == WEIGHTS
    assert max(ends) == pytest.approx(100.0)


def test_a_pipe_that_many_cross_at_once_keeps_all_bytes_in_few_stretches() -> None:
    wide = Pipe(1000.0)
    for number in range(3000):
        [end] = carry([Transfer((wide, Pipe(1.0)), 1.0)], number / 1500)
        assert end == pytest.approx(number / 1500 + 1.0, rel=1e-6) or number / 1500 + 1.0 < end
    assert len(wide._times) < 200
    assert _bytes_over(wide) == pytest.approx(3000.0)


def test_forgetting_the_past_changes_nothing_that_comes() -> None:
    kept, forgetful = Pipe(2.0), Pipe(2.0)
    for pipe in (kept, forgetful):
        carry([Transfer((pipe,), 4.0)], 0.0)
        carry([Transfer((pipe,), 4.0)], 5.0)
    forgetful.forget(4.5)
    assert carry([Transfer((kept,), 3.0)], 4.5) == carry([Transfer((forgetful,), 3.0)], 4.5)
