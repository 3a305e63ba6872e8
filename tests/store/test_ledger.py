"""The books: what a push counts, and what dead workers left behind."""

from __future__ import annotations

import pytest

from paceline.config import RunConfig, Weighting
from paceline.protocols.paced.asp import ASP
from paceline.store.ledger import Ledger
from paceline.store.work.budget import Batch, Source
from paceline.trace.events import Event

BATCH, WORKERS = 10, 4


def ledger(balance: bool, weighting: Weighting = "mean", written: list[Event] | None = None) -> Ledger:
    config = RunConfig(run="r", folder="f", workers=WORKERS, balance=balance, weighting=weighting)
    books = Ledger(config, "asp", ASP(), (written if written is not None else []).append)
    books.offer(Source(80, BATCH), range(WORKERS))
    for rank in range(WORKERS):
        books.join(rank, 0.0)
    return books


@pytest.mark.parametrize("weighting", ["mean", "sum", 0.5])
def test_with_balance_steps_add_up_to_the_same_however_samples_are_split(weighting: Weighting) -> None:
    plain, balanced = ledger(False, weighting), ledger(True, weighting)

    def moved(books: Ledger, sizes: list[int]) -> float:
        return sum(books.config.step_share(books.batches([n]), WORKERS) for n in sizes)

    whole = moved(plain, [BATCH] * 8)
    for sizes in ([BATCH] * 8, [16, 16, 4, 4, 16, 16, 4, 4], [1] * 80):
        assert moved(balanced, sizes) == pytest.approx(whole)
    together = balanced.config.step_share(balanced.batches([16, 16, 4, 4]), WORKERS, "mean")
    assert together == plain.config.step_share(plain.batches([BATCH] * 4), WORKERS, "mean")


def test_without_balance_every_push_counts_the_same_also_a_short_one() -> None:
    assert ledger(False).batches([BATCH, 3, 0]) == 3


def test_a_push_of_unknown_samples_counts_as_a_usual_one() -> None:
    assert ledger(True).batches([0]) == 1
    assert ledger(True).batches([5, 0]) == 1.5


def test_what_a_dead_worker_left_is_abandoned_as_far_as_nobody_took_it_over() -> None:
    books = ledger(True)
    assert books.budget is not None
    books.budget.draw(0)
    books.push(1, 1.0, BATCH, [books.budget.draw(1)])
    books.leave(0, 2.0, "died")
    assert books.abandoned() == BATCH
    for rank in (1, 2, 3):
        books.leave(rank, 2.0, "finished")
    assert books.abandoned() == BATCH
    assert books.budget.draw(1) == Batch(0, 0, BATCH)
    assert books.abandoned() == 0


def push_of(books: Ledger, rank: int, batches: int) -> None:
    assert books.budget is not None
    work = [books.budget.draw(rank) for _ in range(batches)]
    books.push(rank, 1.0, BATCH * batches, [each for each in work if each is not None])


@pytest.mark.parametrize("batches", [1, 2])
def test_a_schedule_counts_steps_however_many_batches_a_gradient_is_of(batches: int) -> None:
    books = ledger(False)
    for rank in range(WORKERS):
        assert books.position() == 0
        push_of(books, rank, batches)
    assert books.position() == 1


def test_a_resumed_schedule_stands_where_it_stood_also_with_gradients_of_several_batches() -> None:
    books, resumed = ledger(False), ledger(False)
    for rank in range(WORKERS):
        push_of(books, rank, 2)
    resumed.resume_at(0, books.samples, books.units, books.pacer.clocks.pushes, books.batches_pushed)
    assert resumed.position() == books.position() == 1


def test_with_balance_a_gradient_of_several_usual_batches_counts_once() -> None:
    books = ledger(True)
    push_of(books, 0, 2)
    assert books.batches([2 * BATCH]) == 1
    assert books.batches([3 * BATCH]) == 1.5
