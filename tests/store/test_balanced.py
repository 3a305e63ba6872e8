"""Every position exactly once per epoch, however large the batches are and whoever draws, dies or resumes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols.rules.balance import MEASUREMENTS, Balancer
from paceline.store.work.balanced import BalancedBudget, check_divisible
from paceline.store.work.budget import Batch, Budget, Source
from paceline.store.work.recorded import AFTER_THE_END, RecordedBudget
from paceline.trace.events import Decided
from support.budgets import Action, Drawers, schedules


class Crew(Drawers):
    """Workers of unequal speed."""

    def __init__(self, source: Source, workers: int, pace: list[float]) -> None:
        super().__init__(source, workers)
        self.pace = pace
        self.budget = self.balanced()

    def balanced(self) -> Budget:
        self.balancer = Balancer(self.source.batch)
        for rank in self.holds:
            self.balancer.join(rank)
        return BalancedBudget(self.source, self.workers, self.balancer)

    def draw(self, rank: int) -> None:
        super().draw(rank)
        batch = self.holds[rank][-1]
        assert batch.count >= 1
        if isinstance(self.budget, BalancedBudget):
            assert batch.count <= self.balancer.size(rank)

    def finish(self, rank: int) -> None:
        finished = self.holds[rank][-1:]
        super().finish(rank)
        for batch in finished:
            self.balancer.measured(rank, batch.count, batch.count * self.pace[rank])

    def die(self, rank: int) -> None:
        super().die(rank)
        if rank not in self.holds:
            self.balancer.leave(rank)

    def resume(self, rank: int) -> None:
        self.go_on_with(self.balanced())

    def without(self, rank: int) -> None:
        """Resumed with balance off; then back on, by the next resume."""
        self.go_on_with(Budget(self.source, self.workers))


@settings(max_examples=300)
@given(
    units=st.integers(1, 60),
    batch=st.integers(1, 7),
    workers=st.integers(1, 5),
    pace=st.lists(st.sampled_from([0.1, 1.0, 2.5, 9.0]), min_size=5, max_size=5),
    drop_last=st.booleans(),
    schedule=schedules("without"),
)
def test_every_position_is_finished_exactly_once(
    units: int, batch: int, workers: int, pace: list[float], drop_last: bool, schedule: list[Action]
) -> None:
    source = Source(units, batch, drop_last)
    if source.batches < workers:
        return
    Crew(source, workers, pace).check(schedule)


def unequal(source: Source) -> BalancedBudget:
    """Rank 1 is three times slower than rank 0, and known to be."""
    balancer = Balancer(source.batch)
    for rank in (0, 1):
        balancer.join(rank)
    for _ in range(MEASUREMENTS):
        balancer.measured(0, 4, 4.0)
        balancer.measured(1, 4, 12.0)
    return BalancedBudget(source, 2, balancer)


def test_a_fast_worker_draws_more_and_the_last_batch_of_an_epoch_may_be_short() -> None:
    budget = unequal(Source(15, 4))
    drawn = [budget.draw(rank) for rank in (0, 1, 0, 1)]
    assert drawn == [Batch(0, 0, 6), Batch(0, 6, 2), Batch(0, 8, 6), Batch(0, 14, 1)]
    assert budget.draw(0) == Batch(1, 0, 6)


def test_what_a_dead_worker_left_is_cut_to_the_size_of_whoever_takes_over() -> None:
    budget = unequal(Source(16, 4))
    budget.draw(0)
    budget.give_back(0)
    assert [budget.draw(1) for _ in range(3)] == [Batch(0, 0, 2), Batch(0, 2, 2), Batch(0, 4, 2)]


def test_only_what_was_given_back_of_an_epoch_counts_as_returned() -> None:
    budget = unequal(Source(8, 4))
    budget.draw(0)
    budget.draw(1)
    budget.draw(0)
    assert not budget.has_returned(0)
    budget.give_back(1)
    assert budget.has_returned(0)


def test_a_resumed_budget_knows_the_speeds() -> None:
    budget = unequal(Source(40, 4))
    fresh = Balancer(4)
    resumed = BalancedBudget(Source(40, 4), 2, fresh)
    resumed.load(msgspec.json.decode(msgspec.json.encode(budget.state())))
    fresh.join(0)
    fresh.join(1)
    assert [resumed.draw(0).count, resumed.draw(1).count] == [6, 2]


def test_a_run_resumed_without_balance_dispenses_batches_of_the_loaders_size() -> None:
    budget = unequal(Source(19, 4))
    budget.finish(0, [budget.draw(0)])
    plain = Budget(Source(19, 4), 2)
    plain.load(budget.state())
    assert [plain.draw(0) for _ in range(4)] == [
        Batch(0, 6, 4),
        Batch(0, 10, 4),
        Batch(0, 14, 4),
        Batch(0, 18, 1),
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [(None, "iterable dataset"), (Source(9, 1, whole=True), "batch sampler of its own")],
)
def test_work_that_cannot_be_cut_is_refused_with_the_reason_and_a_remedy(
    source: Source | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{words}.*or leave --balance out"):
        check_divisible(source)


def test_a_recorded_budget_hands_everybody_what_it_pushed_whoever_asks_first() -> None:
    """Also what one of them took over from the other, in the sizes it had then."""
    work = [(0, ((0, 0, 6),)), (1, ((0, 6, 2),)), (1, ((0, 8, 2), (0, 10, 1))), (0, ((1, 0, 6),))]
    record = [Decided(0.0, n, rank, n, work=batches) for n, (rank, batches) in enumerate(work)]
    budget = RecordedBudget(Source(16, 4), 2, record)
    assert [budget.draw(1) for _ in range(4)] == [
        Batch(0, 6, 2),
        Batch(0, 8, 2),
        Batch(0, 10, 1),
        AFTER_THE_END,
    ]
    assert [budget.draw(0) for _ in range(3)] == [Batch(0, 0, 6), Batch(1, 0, 6), AFTER_THE_END]
    assert budget.finish(0, [Batch(0, 0, 6)]) == (Batch(0, 0, 6),)


def test_what_is_given_back_is_made_one_where_it_touches_and_only_there() -> None:
    budget = unequal(Source(8, 4))
    for rank in (0, 1, 0, 1):
        budget.draw(rank)
    assert [budget.give_back(rank) for rank in (0, 1)] == [
        [Batch(0, 0, 6), Batch(1, 0, 6)],
        [Batch(0, 6, 2), Batch(1, 6, 2)],
    ]
    assert budget.returned == (Batch(0, 0, 8), Batch(1, 0, 8))
    budget.load({"opened": 3, "returned": [(0, 4, 2), (0, 0, 2), (1, 6, 2), (1, 2, 4)]})
    assert budget.returned == (Batch(0, 0, 2), Batch(0, 4, 2), Batch(1, 2, 6))
