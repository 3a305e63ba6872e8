"""The work of a recorded run, handed out again to the same workers in the same portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paceline.store.work.budget import Batch, Budget, Source
from paceline.trace.events import AnyEvent, Decided, WorkerLeft

AFTER_THE_END = Batch(1 << 40, 0, 0)
"""Of an epoch nobody reaches: a worker that is granted it knows that its own loop is over."""


class RecordedBudget(Budget):
    """Dispenses to every worker what the record says it worked on, or died over."""

    def __init__(self, source: Source, workers: int, record: Iterable[AnyEvent]) -> None:
        super().__init__(source, workers)
        self._planned: dict[int, deque[Batch]] = {}
        for event in record:
            if isinstance(event, Decided) and event.pushed is not None:
                self._planned.setdefault(event.pushed, deque()).extend(Batch(*part) for part in event.work)
            elif isinstance(event, WorkerLeft):
                self._planned.setdefault(event.worker, deque()).extend(Batch(*part) for part in event.work)

    def draw(self, worker: int) -> Batch:
        """What the worker pushed next; sizes and who took over from whom are on record, too."""
        planned = self._planned.get(worker)
        if not planned:
            return AFTER_THE_END
        batch = planned.popleft()
        self._drawn.setdefault(worker, []).append(batch)
        return batch

    def has_returned(self, epoch: int) -> bool:
        """Nothing is to be dispensed but what the record says."""
        return False

    def holds(self, worker: int, epoch: int) -> bool:
        """Nobody has to stay for work that a dying worker might leave: the record says who took it over."""
        return False

    def give_back(self, worker: int) -> list[Batch]:
        """Nothing is dispensed twice here: whoever took over is on record, too."""
        unfinished = super().give_back(worker)
        self._returned.clear()
        return unfinished
