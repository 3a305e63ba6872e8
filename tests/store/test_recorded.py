"""A recorded run's work is handed out again as it was, and nothing else."""

from __future__ import annotations

from paceline.store.work.budget import Batch, Source
from paceline.store.work.recorded import AFTER_THE_END, RecordedBudget
from paceline.trace.events import Decided, WorkerLeft

FIRST, SECOND, THIRD = (0, 0, 2), (0, 2, 2), (0, 4, 2)
RECORD = [
    Decided(t=1.0, number=1, pushed=0, version=1, work=(FIRST,)),
    Decided(t=1.0, number=2, pushed=None, version=1),
    WorkerLeft(t=1.0, worker=1, reason="died", work=(SECOND,)),
    Decided(t=1.0, number=3, pushed=0, version=2, work=(SECOND, THIRD)),
]


def test_every_worker_gets_what_it_pushed_or_died_over_then_hears_that_its_loop_is_over() -> None:
    budget = RecordedBudget(Source(6, 2), 2, RECORD)
    assert [budget.draw(0) for _ in range(3)] == [Batch(*FIRST), Batch(*SECOND), Batch(*THIRD)]
    assert [budget.draw(1), budget.draw(1)] == [Batch(*SECOND), AFTER_THE_END]
    assert budget.draw(0) == AFTER_THE_END


def test_what_a_dead_worker_leaves_is_given_to_nobody_but_by_the_record() -> None:
    budget = RecordedBudget(Source(6, 2), 2, RECORD)
    drawn = budget.draw(1)
    assert not budget.holds(1, 0), "nobody has to wait for it"
    assert budget.give_back(1) == [drawn]
    assert budget.returned == ()
    assert not budget.has_returned(0)
    assert budget.draw(0) == Batch(*FIRST)
    assert budget.finish(0, [Batch(*FIRST)]) == (Batch(*FIRST),)
