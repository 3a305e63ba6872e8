"""Asynchronous Parallel."""

from __future__ import annotations

from hypothesis import given

from paceline.protocols import Fate
from paceline.protocols.paced.asp import ASP
from support.drive import Schedule, drive
from support.schedules import schedules


@given(schedule=schedules())
def test_a_push_is_applied_and_its_worker_released_at_once_so_nobody_ever_waits(schedule: Schedule) -> None:
    for step in drive(ASP(), schedule):
        assert step.released == ((step.worker,) if step.event == "push" else ())
        assert step.decision.fate is (Fate.APPLY if step.event == "push" else None)
        assert not step.waiting


def test_the_gap_has_no_bound() -> None:
    steps = list(drive(ASP(), Schedule(workers=2, speeds=(1, 99), transient=0.0, iterations=50)))
    assert max(step.decision.gap for step in steps) == 50


@given(schedule=schedules(churn=False))
def test_staleness_counts_the_steps_others_made_meanwhile(schedule: Schedule) -> None:
    made, read = 0, {}
    for step in drive(ASP(), schedule):
        if step.event == "push":
            assert step.decision.staleness == made - read.get(step.worker, 0)
            made += 1
            read[step.worker] = made
