"""Mixing with neighbours: who has come to which step, and whose neighbours all have.

A worker is answered as soon as those have come whose values it takes; the others go on meanwhile, or come
later. Nobody gets more than `ahead` steps away from the slowest. Where no `ahead` is given, all who are
connected over any number of hops wait for each other.

Who leaves is absent from the steps it has not come to. What a step's rows are depends on that alone, and not
on when somebody left, since whoever takes from it waits until it has come or is gone. Only steps that nobody
can have come to by then are drawn anew among those who are left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from paceline.errors import RunError
from paceline.protocols.core.topology import Rows, Topology, parts

Key = Hashable
"""What tells one step of one topology from all others."""
NOWHERE = -1
Ready = tuple[Key, int]
"""A step, and a worker that can be answered."""


class MixingStep:
    """One step of a topology."""

    def __init__(self, topology: Topology, step: int, ahead: int | None, base: Iterable[int]) -> None:
        self.step, self.ahead = step, ahead
        self.rows: Rows = {}
        self.came: set[int] = set()
        self.mixed: set[int] = set()
        self._topology, self._base = topology, tuple(sorted(base))
        self._absent: set[int] = set()
        self._takers: dict[int, list[int]] = {}
        self._awaited: dict[int, int] = {}
        self._sent: Counter[int] = Counter()

    def plan(self, absent: Iterable[int]) -> None:
        """These do not come. Rows of those who have mixed do not change by that."""
        self._absent |= set(absent)
        self.rows = self._topology.rows(self._base, self.step, self._absent)
        self._sent = Counter(source for row in self.rows.values() for source in row)
        sources = parts(self.rows) if self.ahead is None else self.rows
        self._takers = {rank: [] for rank in self.rows}
        for rank, needed in sources.items():
            for source in needed:
                self._takers[source].append(rank)
        self._awaited = {rank: len(set(needed) - self.came) for rank, needed in sources.items()}

    def arrive(self, rank: int) -> list[int]:
        """A worker has come: whom it was missing for."""
        if rank in self.came:
            raise RunError(
                f"rank {rank} mixes vectors of one size twice at step {self.step}. Give each its own step."
            )
        self.came.add(rank)
        for taker in self._takers[rank]:
            self._awaited[taker] -= 1
        return self._takers[rank]

    def complete(self, rank: int) -> bool:
        """Whether a worker sleeps here for which all have come."""
        return rank in self.came and rank not in self.mixed and self._awaited[rank] == 0

    def missing(self, rank: int) -> list[int]:
        """Whom it waits for."""
        sources = parts(self.rows) if self.ahead is None else self.rows
        return sorted(set(sources[rank]) - self.came)

    def takers(self, rank: int) -> tuple[int, ...]:
        """Who takes what it has brought."""
        return tuple(sorted(taker for taker in self._takers[rank] if rank in self.rows[taker]))

    def messages(self, rank: int) -> int:
        """How many vectors it sends or gets, whichever is more."""
        return max(self._sent[rank], len(self.rows[rank])) - 1


class Mixings:
    """All steps that somebody is in."""

    def __init__(self) -> None:
        self._active: set[int] = set()
        self._steps: dict[Key, MixingStep] = {}
        self._reached: dict[int, int] = {}
        """The last step that each has come to."""
        self._before: int | None = None
        """The step before the first."""
        self._many: Counter[int] = Counter()
        """How many of those who take part have come so far; of one that has not come at all, `NOWHERE`."""

    def __contains__(self, key: Key) -> bool:
        return key in self._steps

    def __getitem__(self, key: Key) -> MixingStep:
        return self._steps[key]

    def join(self, rank: int) -> None:
        """A worker takes part from now on."""
        self._active.add(rank)
        self._move(NOWHERE, 1)

    def arrive(self, rank: int, key: Key, topology: Topology, step: int, ahead: int | None) -> list[Ready]:
        """A worker has come; who can be answered now."""
        slowest, last = min(self._many), self._reached.get(rank, NOWHERE)
        self._reached[rank] = max(step, last)
        self._before = step - 1 if self._before is None else self._before
        self._move(last, -1)
        self._move(self._reached[rank], 1)
        if key not in self._steps:
            self._steps[key] = self._planned(topology, step, ahead)
        near = self._steps[key].arrive(rank)
        if min(self._many) != slowest:
            return self._look()
        return [(key, each) for each in sorted(near) if self._ready(self._steps[key], each)]

    def leave(self, rank: int) -> list[Ready]:
        """A worker comes to no further step."""
        if rank in self._active:
            self._active.discard(rank)
            self._move(self._reached.get(rank, NOWHERE), -1)
        for step in self._steps.values():
            if rank in step.rows and rank not in step.came:
                step.plan([rank])
        self._steps = {key: step for key, step in self._steps.items() if not self._over(step)}
        return self._look()

    def done(self, key: Key, rank: int) -> bool:
        """A worker is answered; whether that was the last of this step."""
        step = self._steps[key]
        step.mixed.add(rank)
        if not self._over(step):
            return False
        del self._steps[key]
        return True

    def _over(self, step: MixingStep) -> bool:
        """Whether nobody is still to be answered."""
        return not any(rank in self._active and rank not in step.mixed for rank in step.rows)

    def _planned(self, topology: Topology, step: int, ahead: int | None) -> MixingStep:
        """Among those who take part, and those who were gone when somebody may have come here already."""
        late = step - 1 - (ahead or 0)
        away = {rank for rank, last in self._reached.items() if rank not in self._active and last >= late}
        made = MixingStep(topology, step, ahead, self._active | away)
        made.plan(away)
        return made

    def _look(self) -> list[Ready]:
        ready = []
        for key, step in self._steps.items():
            ready += [(key, rank) for rank in sorted(step.came) if self._ready(step, rank)]
        return ready

    def _ready(self, step: MixingStep, rank: int) -> bool:
        return rank in self._active and step.complete(rank) and self._near(step)

    def _near(self, step: MixingStep) -> bool:
        """Whether the slowest is not too far behind."""
        assert self._before is not None
        return step.ahead is None or step.step - step.ahead <= max(min(self._many), self._before)

    def _move(self, step: int, by: int) -> None:
        self._many[step] += by
        if not self._many[step]:
            del self._many[step]
