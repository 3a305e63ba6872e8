"""Who does which push: a budget all workers share, or a shard for each.

With equal shards every protocol ends when the slowest worker has done its share, so all protocols
take about the same time; a shared budget lets a fast worker do more, and is what training uses.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import length_hint
from typing import Protocol


class Work(Protocol):
    """Dispenses pushes. A position is given out once, or again after it was given back."""

    total: int
    """Pushes in all, if nobody is lost."""
    samples: list[int]
    """Behind the push that each worker drew last."""
    measures: bool
    """Whether it is to be told how long pushes took."""

    @property
    def undone(self) -> int:
        """Positions that wait for a worker and would be missed."""
        ...

    def has_some_for(self, worker: int) -> bool:
        """Whether the worker would find something to do."""
        ...

    def draw(self, worker: int) -> int | None:
        """The position of the worker's next push; None when there is nothing left for it."""
        ...

    def give_back(self, worker: int, position: int) -> None:
        """A worker was lost before it pushed that position."""
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
    """Positions in order, to whoever is ready; what a lost worker did not finish comes first."""

    def __init__(self, total: int, samples: list[int]) -> None:
        self.total = total
        self.samples = samples
        self._fresh = iter(range(total))
        self._returned: list[int] = []

    @property
    def undone(self) -> int:
        return length_hint(self._fresh) + len(self._returned)

    def has_some_for(self, worker: int) -> bool:
        return self.undone > 0

    def draw(self, worker: int) -> int | None:
        return heappop(self._returned) if self._returned else next(self._fresh, None)

    def give_back(self, worker: int, position: int) -> None:
        heappush(self._returned, position)


class EqualShards(Unmeasured):
    """The same number for each; the shard of a worker that is lost for good is not done."""

    undone = 0

    def __init__(self, workers: int, each: int, samples: list[int]) -> None:
        self.total = workers * each
        self.samples = samples
        self._each = each
        self._done = [0] * workers

    def has_some_for(self, worker: int) -> bool:
        return self._done[worker] < self._each

    def draw(self, worker: int) -> int | None:
        done = self._done[worker]
        if done == self._each:
            return None
        self._done[worker] = done + 1
        return worker * self._each + done

    def give_back(self, worker: int, position: int) -> None:
        self._done[worker] -= 1
