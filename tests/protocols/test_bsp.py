"""Bulk Synchronous Parallel."""

from __future__ import annotations

from hypothesis import given

from paceline.protocols import Fate, Flush, Pacer
from paceline.protocols.paced.bsp import BSP
from support.drive import Schedule, drive
from support.schedules import schedules


def started(workers: int) -> Pacer:
    pacer = Pacer(BSP())
    for worker in range(workers):
        pacer.join(worker, 0.0)
    return pacer


@given(schedule=schedules())
def test_all_are_released_together_or_nobody_is(schedule: Schedule) -> None:
    for step in drive(BSP(), schedule):
        assert set(step.released) in (set(), step.after.keys())
        assert bool(step.released) == (step.waited == step.after.keys() and bool(step.after))


@given(schedule=schedules())
def test_a_round_is_one_step_with_the_mean_of_all_active_workers_gradients(schedule: Schedule) -> None:
    for step in drive(BSP(), schedule):
        if step.event == "push":
            assert step.decision.fate is Fate.HOLD
        if step.released:
            assert step.decision.flush is Flush.MEAN
            assert step.decision.flushed.keys() >= step.after.keys()
            assert step.decision.lr_scale == 1.0


def test_workers_may_share_one_buffer_of_weights() -> None:
    assert BSP.lockstep  # that it keeps this promise is proved for all lockstep protocols


@given(schedule=schedules())
def test_no_gradient_is_stale(schedule: Schedule) -> None:
    assert all(step.decision.staleness == 0 for step in drive(BSP(), schedule))


@given(schedule=schedules(churn=False))
def test_without_changes_every_gradient_weighs_the_same(schedule: Schedule) -> None:
    for step in drive(BSP(), schedule):
        assert set(step.decision.flushed.values()) <= {1.0}


def test_the_last_to_push_releases_the_round() -> None:
    pacer = started(3)
    assert pacer.push(2, 1.0).release == ()
    assert pacer.push(0, 2.0).release == ()
    last = pacer.push(1, 3.0)
    assert last.release == (2, 0, 1)
    assert list(last.flushed) == [0, 1, 2]
    assert last.version == 1


def test_a_late_joiner_is_waited_for() -> None:
    pacer = started(2)
    pacer.push(0, 1.0)
    pacer.join(2, 1.5)
    assert pacer.push(1, 2.0).release == ()
    assert set(pacer.push(2, 3.0).release) == {0, 1, 2}


def test_a_death_ends_the_round_for_the_others_and_keeps_the_gradient_it_left() -> None:
    pacer = started(3)
    pacer.push(0, 1.0)
    pacer.push(1, 2.0)
    assert pacer.leave(0, 3.0).release == ()
    ended = pacer.leave(2, 4.0)
    assert ended.release == (1,)
    assert ended.flushed == {0: 1.0, 1: 1.0}


def test_who_died_with_a_gradient_held_and_came_back_adds_to_it() -> None:
    pacer = started(2)
    pacer.push(0, 1.0)
    pacer.leave(0, 2.0)
    pacer.join(0, 3.0)
    pacer.push(0, 4.0)
    assert pacer.push(1, 5.0).flushed == {0: 2.0, 1: 1.0}
