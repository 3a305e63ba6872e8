"""Batches dealt in turn: a worker's batches are the same in every run, also in one that was resumed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from paceline.store.work.budget import Batch, Source
from paceline.store.work.dealt import Dealt
from support.budgets import Action, Drawers, lengths, schedules, sections_of

FIVE = Source(10, 2)


def firsts(budget: Dealt, rank: int, count: int) -> list[tuple[int, int]]:
    """Epoch and index of the next batches of a worker."""
    drawn = [budget.draw(rank) for _ in range(count)]
    return [(batch.epoch, batch.first // 2) for batch in drawn]


def test_dealing_goes_round_and_round_without_a_break_between_epochs() -> None:
    budget = Dealt(FIVE, 2)
    assert firsts(budget, 0, 6) == [(0, 0), (0, 2), (0, 4), (1, 1), (1, 3), (2, 0)]
    assert firsts(budget, 1, 5) == [(0, 1), (0, 3), (1, 0), (1, 2), (1, 4)]


def test_with_three_an_epoch_begins_with_whoever_comes_after_the_last() -> None:
    budget = Dealt(FIVE, 3)
    assert firsts(budget, 2, 4) == [(0, 2), (1, 0), (1, 3), (2, 1)]
    assert firsts(budget, 0, 4) == [(0, 0), (0, 3), (1, 1), (1, 4)]


def test_where_every_step_is_one_of_all_each_epoch_begins_with_the_first_rank() -> None:
    budget = Dealt(FIVE, 2, level=True)
    drawn = [(rank, budget.draw(rank)) for _ in range(4) for rank in (0, 1)]
    assert [(rank, batch.epoch, batch.first) for rank, batch in drawn if batch.count] == [
        (0, 0, 0),
        (1, 0, 2),
        (0, 0, 4),
        (1, 0, 6),
        (0, 0, 8),
        (0, 1, 0),
        (1, 1, 2),
    ]
    assert drawn[5] == (1, Batch(0, 0, 0)), "in the last round it has nothing to do"


def test_a_resumed_run_deals_everybody_what_it_had() -> None:
    budget, again = Dealt(FIVE, 2), Dealt(FIVE, 2)
    for rank, count in ((0, 4), (1, 3)):
        budget.finish(rank, [budget.draw(rank) for _ in range(count)])
    again.load(budget.state())
    assert [firsts(again, rank, 6) for rank in (0, 1)] == [firsts(budget, rank, 6) for rank in (0, 1)]
    assert again.returned == ()


class Dealers(Drawers):
    def __init__(self, source: Source, workers: int) -> None:
        super().__init__(source, workers)
        self.budget = Dealt(source, workers)

    def resume(self, rank: int) -> None:
        """Only while everybody is there: a stopped run of peers is resumed by as many."""
        if len(self.holds) == self.workers:
            self.go_on_with(Dealt(self.source, self.workers))


@examples(max_examples=15)
@given(
    units=st.integers(1, 40),
    batch=st.integers(1, 7),
    workers=st.integers(1, 5),
    section=lengths,
    schedule=schedules(),
)
def test_every_position_is_finished_exactly_once(
    units: int, batch: int, workers: int, section: int, schedule: list[Action]
) -> None:
    source = Source(units, batch)
    if source.batches >= workers:
        with sections_of(section):
            Dealers(source, workers).check(schedule)
