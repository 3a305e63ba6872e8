"""Who does which push: a budget all workers share, or a shard for each.

With equal shards every protocol ends when the slowest worker has done its share, so all protocols
take about the same time; a shared budget lets a fast worker do more, and is what training uses.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol


class Work(Protocol):
    """Dispenses pushes. Each is given out once, or again after it was given back."""

    total: int
    """Pushes in all, if nobody is lost."""
    samples: list[int]
    """Behind the push that each worker drew last."""
    first: list[int]
    """And the first of these samples."""
    measures: bool
    """Whether it is to be told how long pushes took."""

    @property
    def undone(self) -> int:
        """Pushes that wait for a worker and would be missed."""
        ...

    def has_some_for(self, worker: int) -> bool:
        """Whether the worker would find something to do."""
        ...

    def draw(self, worker: int) -> int:
        """Give the worker its next push. The answer is how many samples that is: 0 if nothing is left."""
        ...

    def give_back(self, worker: int) -> None:
        """A worker was lost before it pushed what it drew last."""
        ...

    def pushed(self, worker: int, samples: int, compute_s: float) -> None:
        """A worker pushed; carried out already, so that it may have drawn anew."""
        ...

    def leave(self, worker: int) -> None:
        """A worker takes part no longer."""
        ...


class Unmeasured:
    """Work that does not depend on how fast workers are."""

    measures = False

    def pushed(self, worker: int, samples: int, compute_s: float) -> None:
        pass

    def leave(self, worker: int) -> None:
        pass


class SharedBudget(Unmeasured):
    """Samples in order, a batch to whoever is ready; what a lost worker did not finish comes first."""

    def __init__(self, total: int, workers: int, batch: int) -> None:
        self.total = total
        self.samples = [batch] * workers
        self.first = [0] * workers
        self._batch = batch
        self._next, self._end = 0, total * batch
        self._returned: list[int] = []

    @property
    def undone(self) -> int:
        return (self._end - self._next) // self._batch + len(self._returned)

    def has_some_for(self, worker: int) -> bool:
        return self.undone > 0

    def draw(self, worker: int) -> int:
        if self._returned:
            self.first[worker] = heappop(self._returned)
        elif self._next < self._end:
            self.first[worker] = self._next
            self._next += self._batch
        else:
            return 0
        return self._batch

    def give_back(self, worker: int) -> None:
        heappush(self._returned, self.first[worker])


class EqualShards(Unmeasured):
    """The same number for each; the shard of a worker that is lost for good is not done."""

    undone = 0

    def __init__(self, each: int, workers: int, batch: int) -> None:
        self.total = workers * each
        self.samples = [batch] * workers
        self.first = [0] * workers
        self._each, self._batch = each, batch
        self._done = [0] * workers

    def has_some_for(self, worker: int) -> bool:
        return self._done[worker] < self._each

    def draw(self, worker: int) -> int:
        done = self._done[worker]
        if done == self._each:
            return 0
        self._done[worker] = done + 1
        self.first[worker] = (worker * self._each + done) * self._batch
        return self._batch

    def give_back(self, worker: int) -> None:
        self._done[worker] -= 1
