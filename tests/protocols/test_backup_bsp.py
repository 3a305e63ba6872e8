"""Synchronous SGD with backup workers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Fate, Flush, Pacer
from paceline.protocols.paced.backup_bsp import BackupBSP
from paceline.protocols.paced.bsp import BSP
from support.drive import Schedule, Step, drive
from support.schedules import schedules

both = pytest.mark.parametrize("late", ["drop", "apply"])
few = st.integers(0, 3)


def started(workers: int, **settings: Any) -> Pacer:
    pacer = Pacer(BackupBSP(**settings))
    for worker in range(workers):
        pacer.join(worker, 0.0)
    return pacer


def needed(step: Step, backups: int) -> int:
    return max(len(step.after) - backups, 1)


@both
@given(schedule=schedules())
def test_without_backups_decides_as_bsp(late: Any, schedule: Schedule) -> None:
    backup = [step.decision for step in drive(BackupBSP(backups=0, late=late), schedule)]
    assert backup == [step.decision for step in drive(BSP(), schedule)]


@both
@given(schedule=schedules(), backups=few)
def test_a_round_ends_as_soon_as_all_but_the_backups_wait(
    late: Any, schedule: Schedule, backups: int
) -> None:
    for step in drive(BackupBSP(backups, late), schedule):
        if step.after:
            assert len(step.waiting) < needed(step, backups)
        if step.decision.flush is not None and step.after:
            assert len(step.waited) >= needed(step, backups)
            assert set(step.released) == step.waited


@both
@given(schedule=schedules(churn=False), backups=few)
def test_a_step_is_the_mean_of_exactly_all_but_the_backups(
    late: Any, schedule: Schedule, backups: int
) -> None:
    for step in drive(BackupBSP(backups, late), schedule):
        if step.event == "push" and step.decision.flush is not None:
            assert step.decision.flush is Flush.MEAN
            assert list(step.decision.flushed.values()) == [1.0] * needed(step, backups)


@given(schedule=schedules(), backups=few)
def test_what_is_late_is_dropped_and_only_what_is_late(schedule: Schedule, backups: int) -> None:
    for step in drive(BackupBSP(backups), schedule):
        if step.event == "push":
            late = step.decision.staleness > 0
            assert step.decision.fate is (Fate.DROP if late else Fate.HOLD)


@both
@given(schedule=schedules(), backups=few)
def test_no_gradient_in_a_rounds_step_was_computed_on_weights_of_an_earlier_round(
    late: Any, schedule: Schedule, backups: int
) -> None:
    began = 0
    for step in drive(BackupBSP(backups, late), schedule):
        if step.event == "push":
            assert (step.decision.fate is Fate.HOLD) == (step.decision.read >= began)
        if step.decision.flush is not None:
            began = step.decision.version


@both
@given(schedule=schedules(), backups=few)
def test_who_is_late_goes_on_at_once(late: Any, schedule: Schedule, backups: int) -> None:
    for step in drive(BackupBSP(backups, late), schedule):
        if step.event == "push" and step.decision.fate is not Fate.HOLD:
            assert step.released == (step.worker,)
            assert step.decision.flush is None
            assert step.decision.fate is Fate(late)


@both
@given(schedule=schedules(), backups=st.integers(5, 9))
def test_with_more_backups_than_workers_each_first_push_makes_the_step(
    late: Any, schedule: Schedule, backups: int
) -> None:
    for step in drive(BackupBSP(backups, late), schedule):
        assert not step.waiting
        if step.decision.fate is Fate.HOLD:
            assert step.released == (step.worker,)


def test_a_late_worker_takes_part_in_the_round_that_has_begun() -> None:
    pacer = started(3)
    pacer.push(0, 1.0)
    assert pacer.push(1, 2.0).release == (0, 1)
    late = pacer.push(2, 3.0)
    assert (late.fate, late.release, late.version) == (Fate.DROP, (2,), 1)
    assert pacer.push(2, 4.0).fate is Fate.HOLD
    assert pacer.push(0, 5.0).flushed == {0: 1.0, 2: 1.0}


def test_a_late_gradient_that_is_applied_is_one_step_and_makes_the_others_no_later() -> None:
    pacer = started(4, backups=2, late="apply")
    pacer.push(0, 1.0)
    assert pacer.push(1, 2.0).version == 1
    assert pacer.push(0, 3.0).fate is Fate.HOLD
    late = pacer.push(2, 4.0)
    assert (late.fate, late.release, late.version) == (Fate.APPLY, (2,), 2)
    on_time = pacer.push(1, 5.0)
    assert (on_time.fate, on_time.staleness, on_time.flushed) == (Fate.HOLD, 1, {0: 1.0, 1: 1.0})
    assert pacer.push(3, 6.0).fate is Fate.APPLY


def test_a_slow_worker_slows_nobody() -> None:
    schedule = Schedule(workers=4, speeds=(1, 1, 1, 200), transient=0.0, iterations=20)
    rounds = [step for step in drive(BackupBSP(backups=1), schedule) if step.decision.flush is not None]
    assert [step.now for step in rounds[:20]] == [n * 0.125 for n in range(1, 21)]


def test_a_death_ends_the_round_when_enough_of_the_others_wait() -> None:
    pacer = started(4)
    pacer.push(0, 1.0)
    pacer.push(1, 2.0)
    assert pacer.leave(2, 3.0).release == (0, 1)  # two of the three that are left
    assert pacer.push(3, 4.0).fate is Fate.DROP


def test_a_gradient_left_by_a_dead_worker_goes_into_the_round_and_takes_nobodys_place() -> None:
    pacer = started(4)
    pacer.push(0, 1.0)
    pacer.leave(0, 2.0)
    assert pacer.push(1, 3.0).release == ()
    assert pacer.push(2, 4.0).flushed == {0: 1.0, 1: 1.0, 2: 1.0}


def test_what_the_last_to_die_leave_behind_is_not_lost() -> None:
    pacer = started(3)
    pacer.push(0, 1.0)
    for worker in (0, 1):
        assert pacer.leave(worker, 2.0).flushed == {}
    assert pacer.leave(2, 3.0).flushed == {0: 1.0}


@both
def test_a_round_without_a_usable_gradient_makes_nobody_late(late: Any) -> None:
    pacer = started(3, late=late)
    pacer.push(0, 1.0, usable=False)
    void = pacer.push(1, 2.0, usable=False)
    assert (void.release, void.version) == ((0, 1), 0)
    assert pacer.push(2, 3.0).fate is Fate.HOLD
    assert pacer.push(0, 4.0).flushed == {0: 1.0, 2: 1.0}


def test_a_resumed_run_has_nobody_late() -> None:
    pacer = Pacer(BackupBSP())
    pacer.resume(40)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    assert pacer.push(0, 1.0).fate is Fate.HOLD


def test_negative_backups_are_refused_with_their_value() -> None:
    with pytest.raises(ConfigError, match="-1"):
        BackupBSP(backups=-1)
    assert BackupBSP(backups=0).backups == 0
