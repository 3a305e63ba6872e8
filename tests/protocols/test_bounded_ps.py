"""The bounded parameter server: a bound, and all starting anew from time to time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.protocols import Fate, Flush, Pacer
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bounded_ps import BoundedPS
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.ssp import SSP
from paceline.protocols.settings import make
from support.drive import Schedule, Step, drive
from support.schedules import schedules

bounds = st.sampled_from([0, 1, 3, None])
periods = st.integers(1, 4)
ONE_SLOW = Schedule(workers=3, speeds=(1, 2, 40), transient=0.0, iterations=30)


@given(schedule=schedules())
def test_without_bound_and_resync_decides_as_asp(schedule: Schedule) -> None:
    bounded = [step.decision for step in drive(BoundedPS(staleness=None, resync=0), schedule)]
    assert bounded == [step.decision for step in drive(ASP(), schedule)]


@given(schedule=schedules())
def test_buffered_without_staleness_decides_as_bsp(schedule: Schedule) -> None:
    bounded = [step.decision for step in drive(BoundedPS(0, resync=0, buffered=True), schedule)]
    assert bounded == [step.decision for step in drive(BSP(), schedule)]


@given(schedule=schedules(), staleness=st.integers(0, 4))
def test_without_resync_decides_as_ssp(schedule: Schedule, staleness: int) -> None:
    bounded = [step.decision for step in drive(BoundedPS(staleness, resync=0), schedule)]
    assert bounded == [step.decision for step in drive(SSP(staleness), schedule)]


@settings(max_examples=100)
@given(
    schedule=schedules(),
    staleness=st.integers(0, 3),
    resync=st.integers(0, 4),
    buffered=st.booleans(),
)
def test_every_iteration_starts_within_the_bound_and_every_push_comes_within_one_more(
    schedule: Schedule, staleness: int, resync: int, buffered: bool
) -> None:
    for step in drive(BoundedPS(staleness, resync, buffered), schedule):
        assert all(step.gap(worker) <= staleness for worker in step.released)
        assert step.event != "push" or step.gap(step.worker) <= staleness + 1


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_bound_is_reached(staleness: int) -> None:
    assert max(step.decision.gap for step in drive(BoundedPS(staleness), ONE_SLOW)) == staleness


@given(schedule=schedules(churn=False), staleness=st.integers(0, 3), resync=st.integers(0, 4))
def test_a_gradient_is_at_most_p_minus_one_times_two_s_plus_one_steps_old(
    schedule: Schedule, staleness: int, resync: int
) -> None:
    for step in drive(BoundedPS(staleness, resync), schedule):
        assert step.decision.staleness <= (schedule.workers - 1) * (2 * staleness + 1)


def with_due(steps: Iterator[Step], resync: int) -> Iterator[tuple[Step, bool, int]]:
    """Each step with whether a resync was due in it, and the steps made since the last one."""
    synced = 0
    for step in steps:
        made = step.decision.version - synced
        due = bool(step.after) and made >= resync * len(step.after)
        yield step, due, made
        if due and step.waited == step.after.keys():
            synced = step.decision.version


@settings(max_examples=100)
@given(schedule=schedules(iterations=20), staleness=bounds, resync=periods, buffered=st.booleans())
def test_once_a_resync_is_due_nobody_starts_until_all_wait_and_then_all_do(
    schedule: Schedule, staleness: int | None, resync: int, buffered: bool
) -> None:
    for step, due, _ in with_due(drive(BoundedPS(staleness, resync, buffered), schedule), resync):
        if due:
            together = step.waited == step.after.keys()
            assert set(step.released) == (step.waited if together else set())
        elif step.event == "push" and staleness is None:
            assert step.worker in step.released


@given(schedule=schedules(churn=False, iterations=20), staleness=bounds, resync=periods)
def test_all_start_together_within_the_period_and_one_more_push_each(
    schedule: Schedule, staleness: int | None, resync: int
) -> None:
    for step, due, made in with_due(drive(BoundedPS(staleness, resync), schedule), resync):
        if due and step.event == "push" and len(step.after) == schedule.workers:
            assert resync * schedule.workers <= made < (resync + 1) * schedule.workers


@pytest.mark.parametrize("resync", [1, 3])
def test_a_worker_alone_with_one_that_does_nothing_makes_exactly_the_steps_of_a_period(resync: int) -> None:
    pacer = Pacer(BoundedPS(None, resync))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    for step in range(1, 2 * resync):
        assert pacer.push(0, float(step)).release == (0,)
    assert pacer.push(0, 50.0).release == ()
    assert pacer.push(1, 60.0).release == (1, 0)
    assert pacer.push(0, 61.0).release == (0,)  # and a new period has begun


@given(schedule=schedules(), staleness=bounds, resync=st.integers(0, 3))
def test_buffered_gradients_make_one_step_when_the_slowest_clock_ticks(
    schedule: Schedule, staleness: int | None, resync: int
) -> None:
    slowest = 0
    for step in drive(BoundedPS(staleness, resync, buffered=True), schedule):
        ticked = bool(step.after) and step.slowest != slowest
        slowest = step.slowest if step.after else slowest
        assert step.decision.fate in (None, Fate.HOLD)
        if ticked or step.waited == step.after.keys():
            assert step.clocks.held == 0
        else:
            assert not step.decision.flushed
        one_each = staleness == 0 or step.decision.gradients == len(step.after)
        if step.decision.flushed:
            assert step.decision.flush is (Flush.MEAN if one_each else Flush.PART)


def test_a_fast_worker_may_have_several_gradients_in_one_buffered_step() -> None:
    pacer = Pacer(BoundedPS(staleness=2, buffered=True))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    assert pacer.push(0, 1.0).release == (0,)
    assert pacer.push(0, 2.0).release == (0,)
    assert pacer.push(1, 3.0).flushed == {0: 2.0, 1: 1.0}


def test_a_death_lets_a_resync_happen() -> None:
    pacer = Pacer(BoundedPS(None, resync=1))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    for now in (1.0, 2.0):
        assert pacer.push(0, now).release == (0,)
    assert pacer.push(0, 3.0).release == ()
    assert pacer.push(1, 4.0).release == ()
    assert pacer.leave(2, 5.0).release == (1, 0)


def test_an_unusable_gradient_holds_nobody_up() -> None:
    pacer = Pacer(BoundedPS(None, resync=1))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)
    assert pacer.push(0, 2.0, usable=False).release == ()  # would have been the second step
    assert pacer.leave(1, 3.0).release == (0,)


def test_settings_can_be_typed() -> None:
    made = make("bounded_ps", {"staleness": "null", "resync": "0", "buffered": "true"})
    assert made == BoundedPS(None, 0, True)


@pytest.mark.parametrize(("setting", "value"), [("staleness", -1), ("resync", -2)])
def test_negative_settings_are_refused_with_their_value(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{setting} must be >= 0, got {value}"):
        BoundedPS(**{setting: value})


@given(
    schedule=schedules(),
    staleness=st.sampled_from([None, 0, 1, 2]),
    resync=st.integers(0, 3),
    buffered=st.booleans(),
)
def test_waits_for_the_bound_and_for_the_meeting_are_all_the_waiting_there_is(
    schedule: Schedule, staleness: int | None, resync: int, buffered: bool
) -> None:
    """Against a count of our own, event by event; and nothing is decided otherwise because of it."""
    protocol = BoundedPS(staleness, resync, buffered, tell_waits=True)
    waited, asleep, before, notes = 0.0, frozenset[int](), 0.0, []
    for step, plain in zip(
        drive(protocol, schedule), drive(BoundedPS(staleness, resync, buffered), schedule), strict=True
    ):
        waited += len(asleep) * (step.now - before)
        asleep, before = step.waiting, step.now
        notes += [step.decision.note] * bool(step.decision.note)
        assert replace(step.decision, note="") == plain.decision
    assert sum(protocol.waited_s.values()) == pytest.approx(waited)
    if not resync:
        assert "meeting" not in protocol.waited_s
    if staleness is None:
        assert "bound" not in protocol.waited_s
    assert notes[-1].startswith("all workers together waited ")


def test_a_wait_is_for_the_bound_until_the_slowest_moves_and_for_the_meeting_then() -> None:
    protocol = BoundedPS(staleness=0, resync=2, tell_waits=True)
    pacer = Pacer(protocol)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)
    assert pacer.push(1, 4.0).release == (0, 1)  # 0 waited 3 s for the bound
    pacer.push(0, 5.0)
    assert pacer.push(1, 7.0).release == (0, 1)  # and 2 s more; four steps: all wait, so all start
    assert protocol.waited_s == {"bound": 5.0}
    free = BoundedPS(staleness=None, resync=1, tell_waits=True)
    pacer = Pacer(free)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    assert pacer.push(0, 1.0).release == (0,)
    assert pacer.push(0, 2.0).release == ()
    assert sorted(pacer.push(1, 5.0).release) == [0, 1]
    pacer.leave(0, 6.0)
    assert pacer.leave(1, 6.0).note == "all workers together waited 0 s for the bound and 3 s to meet"


def test_when_a_death_ends_a_round_all_that_is_held_counts_and_no_more() -> None:
    pacer = Pacer(BoundedPS(1, buffered=True))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    pacer.push(0, 1.0)
    pacer.push(1, 2.0)
    decision = pacer.leave(2, 3.0)
    assert (decision.flush, decision.gradients) == (Flush.MEAN, 2)
