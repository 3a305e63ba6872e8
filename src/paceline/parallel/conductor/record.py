"""Iterations of a mesh's workers as the events that any run writes, put into the order of time.

An iteration of a worker is a push, with the time it computed; that it had what it needed for the next one is
its release. So tables, reports and waiting shares need not know that the model was split.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from math import inf

from paceline.parallel.messages import Iteration
from paceline.trace.events import AnyEvent, Decided


class Record:
    """Takes iterations in any order, and writes them in that of their times."""

    def __init__(self, emit: Callable[[AnyEvent], None], workers: int) -> None:
        self._emit = emit
        self._early: list[tuple[float, int, int, Iteration | None]] = []
        """When, a number, the rank, and what; None: it begins."""
        self._numbers, self._verdicts = count(), count()
        self.clocks = dict.fromkeys(range(workers), 0)
        self._waiting: set[int] = set()

    @property
    def version(self) -> int:
        """Updates that all workers have made."""
        return min(self.clocks.values())

    def add(self, rank: int, end: float, done: Iteration) -> None:
        """A worker has completed an iteration."""
        heapq.heappush(self._early, (end - done.busy_s, next(self._numbers), rank, None))
        heapq.heappush(self._early, (end, next(self._numbers), rank, done))

    def flush(self, until: float = inf) -> None:
        """Write what happened by then."""
        while self._early and self._early[0][0] <= until:
            t, _, rank, done = heapq.heappop(self._early)
            if done is None:
                self._begins(rank, t)
            else:
                self._pushed(rank, t, done)

    def _begins(self, rank: int, t: float) -> None:
        if rank in self._waiting:
            self._waiting.discard(rank)
            gap = self.clocks[rank] - self.version
            self._emit(Decided(t, next(self._verdicts), None, self.version, release=(rank,), gap=gap))

    def _pushed(self, rank: int, t: float, done: Iteration) -> None:
        before, self.clocks[rank] = self.clocks[rank], done.clock
        self._waiting.add(rank)
        self._emit(
            Decided(
                t,
                next(self._verdicts),
                rank,
                self.version,
                fate="apply" if done.clock > before else "hold",
                clock=done.clock,
                samples=done.samples,
                read=max(0, done.clock - 1 - done.staleness),
                staleness=done.staleness,
                compute_s=done.busy_s,
            )
        )
