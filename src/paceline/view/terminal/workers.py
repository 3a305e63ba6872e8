"""What each worker is doing, as events tell it: the part of the progress view that needs no terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.trace.events import AnyEvent, Decided, Heard, Silent, WorkerJoined, WorkerLeft

COMPUTING, WAITING, AWAY, LEFT, DIED, FAILED = "computing", "waiting", "away", "left", "died", "failed"
SILENT = "silent"
STATES = (COMPUTING, WAITING, SILENT, AWAY, LEFT, DIED, FAILED)
_AFTER = {"finished": LEFT, "stopped": LEFT, "away": AWAY, "died": DIED, "failed": FAILED}


@dataclass(slots=True)
class WorkerStatus:
    """One worker now."""

    rank: int
    state: str = COMPUTING
    clock: int = 0
    staleness: int | None = None
    """Of its last push; None before the first."""

    @property
    def active(self) -> bool:
        """Whether it takes part."""
        return self.state in (COMPUTING, WAITING, SILENT)


class Workers:
    """All workers now."""

    def __init__(self) -> None:
        self.by_rank: dict[int, WorkerStatus] = {}
        self._begun = False

    @property
    def slowest(self) -> int:
        """The smallest clock among those who take part."""
        if not self._begun:
            return 0  # thousands may join before the first push
        return min((worker.clock for worker in self.by_rank.values() if worker.active), default=0)

    def add(self, event: AnyEvent) -> None:
        """Take the next event."""
        match event:
            case Decided():
                self._decided(event)
            case WorkerJoined():
                self._joined(event.worker)
            case Silent():
                self._worker(event.worker).state = SILENT
            case Heard():
                if self._worker(event.worker).state == SILENT:
                    self._worker(event.worker).state = COMPUTING
            case WorkerLeft():
                self._worker(event.worker).state = _AFTER[event.reason]

    def leads(self) -> dict[int, int]:
        """Iterations each of those who take part is ahead of the slowest."""
        slowest = self.slowest
        return {rank: worker.clock - slowest for rank, worker in self.by_rank.items() if worker.active}

    def states(self) -> Counter[str]:
        """How many are in each state."""
        return Counter(worker.state for worker in self.by_rank.values())

    def ranked(self) -> list[WorkerStatus]:
        """In the order of their ranks."""
        return [self.by_rank[rank] for rank in sorted(self.by_rank)]

    def slowest_first(self, most: int) -> list[WorkerStatus]:
        """Those who hold the others back, the slowest first."""
        active = [worker for worker in self.by_rank.values() if worker.active]
        return sorted(active, key=lambda worker: (worker.clock, worker.rank))[:most]

    def _worker(self, rank: int) -> WorkerStatus:
        return self.by_rank.setdefault(rank, WorkerStatus(rank))

    def _joined(self, rank: int) -> None:
        # As in the clock table: a newcomer starts level with the slowest, never below its own past.
        slowest, worker = self.slowest, self._worker(rank)
        worker.clock = max(slowest, worker.clock)
        worker.state = COMPUTING

    def _decided(self, event: Decided) -> None:
        if event.pushed is not None:
            self._begun = True
            worker = self._worker(event.pushed)
            worker.state, worker.clock, worker.staleness = WAITING, event.clock, event.staleness
        for rank in event.release:
            self._worker(rank).state = COMPUTING
