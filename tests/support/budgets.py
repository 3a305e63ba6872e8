"""Workers that share a budget, and no store: they draw, finish and die, and what they finish is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import msgspec
from hypothesis import strategies as st

from paceline.store.work import budget as budgets
from paceline.store.work.budget import Batch, Budget, Source

Action = tuple[str, int]
EPOCHS = 3
lengths = st.sampled_from([1, 2, 5, budgets.SECTION])


@contextmanager
def sections_of(batches: int) -> Iterator[None]:
    """Epochs are dealt so many batches at a time."""
    with patch.object(budgets, "SECTION", batches):
        yield


def schedules(*further: str) -> st.SearchStrategy[list[Action]]:
    """What happens to which rank; `further`: methods of the crew beside those that all have."""
    names = ["draw", "draw", "draw", "finish", "finish", "die", "resume", *further]
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 4)), max_size=60)


class Drawers:
    """Whoever uses it sets a budget, and says how a run is resumed."""

    budget: Budget

    def __init__(self, source: Source, workers: int) -> None:
        self.source, self.workers = source, workers
        self.holds: dict[int, list[Batch]] = {rank: [] for rank in range(workers)}
        self.done: Counter[tuple[int, int]] = Counter()

    def act(self, action: str, rank: int) -> None:
        if rank in self.holds:
            getattr(self, action)(rank)

    def draw(self, rank: int) -> None:
        self.holds[rank].append(self.budget.draw(rank))

    def finish(self, rank: int) -> None:
        """The batch drawn last first: not always in order."""
        if self.holds[rank]:
            batch = self.holds[rank].pop()
            assert self.budget.finish(rank, [batch]) == (batch,)
            self.done.update((batch.epoch, position) for position in range(batch.first, batch.end))

    def die(self, rank: int) -> None:
        """Unless it is the last one."""
        if len(self.holds) > 1:
            held = self.holds.pop(rank)
            assert sorted(self.budget.give_back(rank), key=repr) == sorted(held, key=repr)

    def go_on_with(self, budget: Budget) -> None:
        """A checkpoint on the way, through JSON."""
        budget.load(msgspec.json.decode(msgspec.json.encode(self.budget.state())))
        self.budget = budget
        self.holds = {rank: [] for rank in self.holds}

    def check(self, schedule: list[Action]) -> None:
        """Whatever happens, every position is finished exactly once in each planned epoch."""
        for action, rank in schedule:
            self.act(action, rank)
        self._to_the_end()
        source = self.source
        kept = source.units // source.batch * source.batch if source.drop_last else source.units
        planned = {place: times for place, times in self.done.items() if place[0] < EPOCHS}
        assert planned == Counter((epoch, i) for epoch in range(EPOCHS) for i in range(kept))

    def _to_the_end(self) -> None:
        """Whoever is left works through the planned epochs."""
        for rank in self.holds:
            while not self.holds[rank] or min(b.epoch for b in self.holds[rank]) < EPOCHS:
                self.draw(rank)
                self.holds[rank].sort(key=lambda batch: -batch.epoch)
                while self.holds[rank] and self.holds[rank][-1].epoch < EPOCHS:
                    self.finish(rank)
