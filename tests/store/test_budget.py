"""Every position of every epoch is worked on exactly once, whoever draws, dies, or is resumed."""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.store.budget import Batch, Budget, Source
from paceline.store.chunks import shards_of

Shards = Literal["shared", "equal", "own", "rotating"]
Action = tuple[str, int]
EPOCHS = 3

actions = st.lists(
    st.tuples(
        st.sampled_from(["draw", "draw", "draw", "finish", "finish", "die", "resume"]), st.integers(0, 4)
    ),
    max_size=60,
)


def budget(source: Source, workers: int, shards: Shards) -> Budget:
    return shards_of(source, RunConfig(run="", folder="", workers=workers, shards=shards))


class Crew:
    """Workers that draw, finish and die; what they finish is counted here."""

    def __init__(self, source: Source, workers: int, shards: Shards) -> None:
        self.source, self.shards, self.workers = source, shards, workers
        self.budget = budget(source, workers, shards)
        self.holds: dict[int, list[Batch]] = {rank: [] for rank in range(workers)}
        self.done: Counter[tuple[int, int]] = Counter()

    def act(self, action: str, rank: int) -> None:
        if rank in self.holds:
            getattr(self, action)(rank)

    def draw(self, rank: int) -> None:
        self.holds[rank].append(self.budget.draw(rank))

    def finish(self, rank: int, number: int = 1) -> None:
        """Not always the batch that was drawn first."""
        used = [self.holds[rank].pop() for _ in range(min(number, len(self.holds[rank])))]
        assert self.budget.finish(rank, used) == tuple(used)
        for batch in used:
            self.done.update((batch.epoch, batch.first + i) for i in range(batch.count))

    def die(self, rank: int) -> None:
        if len(self.holds) > 1:
            held = self.holds.pop(rank)
            assert sorted(self.budget.give_back(rank), key=repr) == sorted(held, key=repr)

    def resume(self, rank: int) -> None:
        """A checkpoint on the way, through JSON, with as many workers as there are now."""
        state = msgspec.json.decode(msgspec.json.encode(self.budget.state()))
        self.budget = budget(self.source, self.workers, self.shards)
        for absent in set(range(self.workers)) - set(self.holds):
            self.budget.give_back(absent)
        self.budget.load(state)
        self.holds = {rank: [] for rank in self.holds}

    def to_the_end(self) -> None:
        """Whoever is left works through the planned epochs."""
        for rank in self.holds:
            while not self.holds[rank] or min(b.epoch for b in self.holds[rank]) < EPOCHS:
                self.draw(rank)
                self.holds[rank].sort(key=lambda batch: -batch.epoch)
                while self.holds[rank] and self.holds[rank][-1].epoch < EPOCHS:
                    self.finish(rank)


@settings(max_examples=300)
@given(
    units=st.integers(1, 40),
    batch=st.integers(1, 7),
    workers=st.integers(1, 5),
    shards=st.sampled_from(["shared", "equal", "own", "rotating"]),
    drop_last=st.booleans(),
    schedule=actions,
)
def test_every_position_is_finished_exactly_once(
    units: int, batch: int, workers: int, shards: Shards, drop_last: bool, schedule: list[Action]
) -> None:
    source = Source(units, batch, drop_last)
    if source.batches < workers:
        return
    crew = Crew(source, workers, shards)
    for action, rank in schedule:
        crew.act(action, rank)
    crew.to_the_end()
    kept = units // batch * batch if drop_last else units
    planned = {place: times for place, times in crew.done.items() if place[0] < EPOCHS}
    assert planned == Counter((epoch, i) for epoch in range(EPOCHS) for i in range(kept))


def test_batches_come_in_order_and_the_last_may_be_short() -> None:
    budget = Budget(Source(10, 4), 2)
    drawn = [budget.draw(rank) for rank in (0, 1, 0, 1)]
    assert drawn == [Batch(0, 0, 4), Batch(0, 4, 4), Batch(0, 8, 2), Batch(1, 0, 4)]


def test_what_was_given_back_is_dispensed_first_and_in_order() -> None:
    budget = Budget(Source(16, 4), 2)
    for rank in (0, 1, 0):
        budget.draw(rank)
    assert budget.give_back(0) == [Batch(0, 0, 4), Batch(0, 8, 4)]
    assert [budget.draw(1).first for _ in range(3)] == [0, 8, 12]


def test_work_of_a_later_epoch_that_was_given_back_does_not_come_before_ones_own_share() -> None:
    """Who finished early gives back what it drew of the next epoch; the slow one is still in this."""
    budget = Budget(Source(16, 4), 2, "equal")
    assert [budget.draw(0) for _ in range(3)] == [Batch(0, 0, 4), Batch(0, 8, 4), Batch(1, 0, 4)]
    budget.finish(0, [Batch(0, 0, 4), Batch(0, 8, 4)])
    budget.give_back(0)
    assert [budget.draw(1) for _ in range(3)] == [Batch(0, 4, 4), Batch(0, 12, 4), Batch(1, 0, 4)]


def test_equal_shares_are_dealt_batch_by_batch() -> None:
    budget = Budget(Source(24, 4), 2, "equal")
    assert [budget.draw(1).first for _ in range(3)] == [4, 12, 20]
    assert [budget.draw(0).first for _ in range(3)] == [0, 8, 16]


def test_only_what_was_drawn_can_be_finished() -> None:
    budget = Budget(Source(8, 4), 2)
    mine, others = budget.draw(0), budget.draw(1)
    assert budget.finish(0, [others]) == ()
    assert budget.finish(0, [mine, mine]) == (mine,)
    assert budget.finish(0, [mine]) == ()


def test_the_first_epoch_with_work_left_is_known() -> None:
    budget = Budget(Source(8, 4), 2)
    first = budget.draw(0)
    budget.draw(1)
    budget.draw(1)
    assert budget.epoch == 0
    budget.finish(0, [first])
    assert budget.epoch == 0, "rank 1 still holds a batch of epoch 0"
    budget.finish(1, [Batch(0, 4, 4)])
    assert budget.epoch == 1


def test_work_done_in_vain_is_dispensed_again_after_a_resume() -> None:
    budget = Budget(Source(8, 4), 2)
    batch = budget.draw(0)
    budget.finish(0, [batch])
    state = budget.state(unapplied=[batch])
    resumed = Budget(Source(8, 4), 2)
    resumed.load(state)
    assert resumed.draw(0) == batch


@pytest.mark.parametrize(("units", "batch", "workers", "drop_last"), [(4, 4, 2, False), (7, 4, 2, True)])
def test_fewer_batches_than_workers_are_refused(
    units: int, batch: int, workers: int, drop_last: bool
) -> None:
    with pytest.raises(ConfigError, match=r"1 batches per epoch for 2 workers"):
        Budget(Source(units, batch, drop_last), workers)
