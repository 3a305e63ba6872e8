"""Who did what when: each worker's time cut into computing, waiting and exchanging.

The three follow each other without overlap: an iteration is computed until its push, then the worker
waits until it is released, then it exchanges, for as long as its own push and the verdict that released
it say (the longer of the two), at most until its next iteration begins. What remains (loading data,
evaluating, being away) stays blank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from paceline.trace.events import AnyEvent, Decided, Gap, RunEnded, WorkerJoined, WorkerLeft

State = Literal["compute", "wait", "exchange"]


class StateSpan(NamedTuple):
    """A worker was in one state from `start` to `end`."""

    worker: int
    state: State
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


class Spans:
    """Takes events one by one and gives the spans that they complete."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[float, float]] = {}
        self._released: dict[int, tuple[float, float]] = {}

    def add(self, event: AnyEvent) -> Iterator[StateSpan]:
        """The spans that end with this event; none is empty."""
        return (span for span in self._ended(event) if span.end > span.start)

    def _ended(self, event: AnyEvent) -> Iterator[StateSpan]:
        match event:
            case Decided():
                yield from self._decided(event)
            case WorkerJoined():
                self._released[event.worker] = (event.t, 0.0)
            case WorkerLeft():
                yield from self._left(event.worker, event.t)
            case Gap():  # who waited or exchanged before it, nobody knows any more
                self._waiting.clear()
                self._released.clear()
            case RunEnded():
                for worker in sorted({*self._waiting, *self._released}):
                    yield from self._left(worker, event.t)

    def _decided(self, event: Decided) -> Iterator[StateSpan]:
        worker = event.pushed
        if worker is not None:
            released, exchange_s = self._released.pop(worker, (0.0, 0.0))
            began = max(event.t - event.compute_s, released)
            yield StateSpan(worker, "exchange", released, min(released + exchange_s, began))
            yield StateSpan(worker, "compute", began, event.t)
            self._waiting[worker] = (event.t, event.exchange_s)
        for worker in event.release:
            since, exchange_s = self._waiting.pop(worker, (event.t, 0.0))
            yield StateSpan(worker, "wait", since, event.t)
            self._released[worker] = (event.t, max(exchange_s, event.exchange_s))

    def _left(self, worker: int, now: float) -> Iterator[StateSpan]:
        since, _ = self._waiting.pop(worker, (now, 0.0))
        yield StateSpan(worker, "wait", since, now)
        released, exchange_s = self._released.pop(worker, (now, 0.0))
        yield StateSpan(worker, "exchange", released, min(released + exchange_s, now))


def spans(events: Iterable[AnyEvent]) -> Iterator[StateSpan]:
    """All spans of a trace."""
    cutter = Spans()
    for event in events:
        yield from cutter.add(event)
