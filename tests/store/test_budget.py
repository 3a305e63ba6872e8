"""Every position of every epoch is worked on exactly once, whoever draws, dies, or is resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.store.work.budget import Batch, Budget, Source
from paceline.store.work.chunks import Chunked, shards_of
from paceline.store.work.dealt import Dealt
from support.budgets import Action, Drawers, lengths, schedules, sections_of

Shards = Literal["shared", "equal", "own", "rotating"]


class Crew(Drawers):
    def __init__(self, source: Source, workers: int, shards: Shards) -> None:
        super().__init__(source, workers)
        self.shards = shards
        self.budget = self.fresh()

    def fresh(self) -> Budget:
        return shards_of(self.source, RunConfig(run="", folder="", workers=self.workers, shards=self.shards))

    def resume(self, rank: int) -> None:
        """With as many workers as there are now."""
        budget = self.fresh()
        for absent in set(range(self.workers)) - set(self.holds):
            budget.give_back(absent)
        self.go_on_with(budget)


@settings(max_examples=300)
@given(
    units=st.integers(1, 40),
    batch=st.integers(1, 7),
    workers=st.integers(1, 5),
    shards=st.sampled_from(["shared", "equal", "own", "rotating"]),
    drop_last=st.booleans(),
    section=lengths,
    schedule=schedules(),
)
def test_every_position_is_finished_exactly_once(
    units: int,
    batch: int,
    workers: int,
    shards: Shards,
    drop_last: bool,
    section: int,
    schedule: list[Action],
) -> None:
    source = Source(units, batch, drop_last)
    if source.batches < workers:
        return
    with sections_of(section):
        Crew(source, workers, shards).check(schedule)


KINDS: dict[str, Callable[[Source, int], Budget]] = {
    "shared": Budget,
    "equal": partial(Budget, shards="equal"),
    "own": partial(Chunked, rotating=False),
    "rotating": partial(Chunked, rotating=True),
    "level": partial(Budget, shards="equal", level=True),
    "dealt": Dealt,
    "dealt level": partial(Dealt, level=True),
}


@pytest.mark.parametrize("kind", KINDS)
@given(
    units=st.integers(8, 60),
    batch=st.integers(1, 4),
    workers=st.integers(1, 3),
    section=st.integers(1, 7),
    draws=st.lists(st.integers(0, 2), max_size=60),
    stop=st.integers(0, 60),
)
def test_how_much_is_dealt_at_a_time_does_not_change_who_gets_what(
    kind: str, units: int, batch: int, workers: int, section: int, draws: list[int], stop: int
) -> None:
    """Also of a run that is resumed after some draws."""
    source = Source(units, batch)
    if source.batches < workers:
        return

    def drawn(length: int) -> list[Batch]:
        with sections_of(length):
            budget, found = KINDS[kind](source, workers), []
            for number, rank in enumerate(draws):
                if number == stop:
                    state = msgspec.json.encode(budget.state())
                    budget = KINDS[kind](source, workers)
                    budget.load(msgspec.json.decode(state))
                found.append(budget.draw(rank % workers))
                budget.finish(rank % workers, found[-1:])
        return found

    assert drawn(section) == drawn(10**6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_of_ten_billion_samples_is_dispensed_and_saved_in_little_memory(kind: str) -> None:
    source, state = Source(10**10, 64), b""
    for _ in range(2):
        budget = KINDS[kind](source, 3)
        if state:
            budget.load(msgspec.json.decode(state))
        drawn = [(rank, budget.draw(rank)) for _ in range(5000) for rank in range(3)]
        assert len({batch.first for _, batch in drawn}) == 15000
        for rank, batch in drawn:
            assert budget.finish(rank, [batch]) == (batch,)
        budget.give_back(2)
        state = msgspec.json.encode(budget.state())
        assert len(state) < 500_000
    left = sum(count for epoch, _, count in msgspec.json.decode(state)["returned"] if epoch == 0)
    assert left == 10**10 - 2 * 15000 * 64


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


def test_in_lockstep_who_comes_late_owes_no_draws_and_is_owed_none() -> None:
    budget = Budget(Source(16, 2), 2, level=True)
    for rank in (0, 1, 0, 1, 2, 0, 1):
        assert budget.draw(rank).count == 2
    drawn = [budget.draw(rank) for rank in (2, 0, 1, 2)]
    assert drawn == [Batch(0, 14, 2), Batch(1, 0, 2), Batch(1, 2, 2), Batch(1, 4, 2)]


@pytest.mark.parametrize("shards", ["shared", "equal"])
def test_in_lockstep_who_asks_first_at_the_end_of_an_epoch_waits_for_its_last_round_too(shards: Any) -> None:
    """Workers that accumulate gradients ask for several batches between two rounds."""
    budget = Budget(Source(7, 1), 2, shards, level=True)
    for rank in (0, 1, 0, 1, 0, 1, 0):
        assert budget.draw(rank).count == 1
    assert budget.draw(1) == Batch(0, 0, 0)
    budget = Budget(Source(7, 1), 2, "equal", level=True)
    drawn = [budget.draw(rank) for rank in (0, 1, 0, 1, 0, 1, 1, 0, 1, 0)]
    assert drawn[6:] == [Batch(0, 0, 0), Batch(0, 6, 1), Batch(1, 1, 1), Batch(1, 0, 1)]


@pytest.mark.parametrize(
    ("source", "units", "steps"),
    [
        (Source(10, 2), 10, 3),
        (Source(10, 2), 14, 4),
        (Source(11, 2, drop_last=True), 10, 3),
        (Source(5, 1, whole=True), 7, 4),
    ],
)
def test_steps_are_counted_as_one_process_with_the_batches_of_a_round_would(
    source: Source, units: int, steps: int
) -> None:
    assert source.step(units, 2) == steps


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_near_the_end_of_a_long_epoch_goes_on_there(kind: str) -> None:
    source = Source(10**10, 64)
    rest = [[0, 10**10 - 64 * 30, 64 * 30]]
    budget = KINDS[kind](source, 3)
    budget.load({"opened": 1, "returned": rest})
    drawn = []
    for rank in range(3):
        while (batch := budget.draw(rank)).epoch == 0 and batch.count:
            drawn.append(batch)
    assert sorted(batch.first for batch in drawn) == list(range(10**10 - 64 * 30, 10**10, 64))
