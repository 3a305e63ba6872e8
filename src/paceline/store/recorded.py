"""The work of a recorded run, handed out again to the same workers in the same portions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paceline.store.budget import Batch, Budget, Source
from paceline.trace.events import AnyEvent, Decided

AFTER_THE_END = 1 << 40
"""An epoch nobody reaches: a worker that is granted work of it knows that its own loop is over."""


class RecordedBudget(Budget):
    """Dispenses to every worker what the record says it worked on."""

    def __init__(self, source: Source, workers: int, record: Iterable[AnyEvent]) -> None:
        super().__init__(source, workers)
        self._planned: dict[int, deque[Batch]] = {}
        for event in record:
            if isinstance(event, Decided) and event.pushed is not None:
                self._planned.setdefault(event.pushed, deque()).extend(Batch(*part) for part in event.work)

    def _next(self, worker: int) -> Batch:
        planned = self._planned.get(worker)
        return planned.popleft() if planned else Batch(AFTER_THE_END, 0, 0)

    def holds(self, worker: int, epoch: int) -> bool:
        """Nobody has to stay for work that a dying worker might leave: the record says who took it over."""
        return False

    def give_back(self, worker: int) -> list[Batch]:
        """Nothing is dispensed twice here: whoever took over is on record, too."""
        unfinished = super().give_back(worker)
        self._returned.clear()
        return unfinished
