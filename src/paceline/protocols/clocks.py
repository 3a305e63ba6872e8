"""The clock table: who has completed how many iterations, who waits, since when.

What all paced protocols share lives here once. A protocol sees `Clocks`, which only reads; the
pacer alone holds the `ClockTable` and writes. A *clock* is the number of iterations a worker has
completed and pushed. Every answer is amortised O(log n) in the number of workers.

A worker that joins late, or comes back, starts at the clock of the slowest. So `slowest` never
falls, nobody is thrown back by a newcomer, and no newcomer is ahead of what a protocol allows: at
its own earlier clock, one that died while it waited would start the iteration it was refused.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import KeysView, Mapping
from types import MappingProxyType


class Clocks:
    """The clock table as a protocol sees it."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the run began, at the event being judged."""
        self.version = 0
        """Optimizer steps made so far."""
        self.pushes = 0
        """Pushes received so far."""
        self.slowest = 0
        """The smallest clock among active workers."""
        self.fastest = 0
        """The largest clock among active workers."""
        self.left: int | None = None
        """Who left, when that is the event being judged: what a rule remembers of it is to be forgotten."""
        self._completed: dict[int, int] = {}
        self._last_push_s: dict[int, float] = {}
        self._interval_s: dict[int, float] = {}
        self._samples: dict[int, int] = {}
        self._read: dict[int, int] = {}
        self._held: dict[int, float] = {}
        self._held_count = 0
        self._at: dict[int, int] = {}
        self._waiting: dict[int, dict[int, None]] = {}
        self._waiting_clocks: list[int] = []
        self._waiting_count = 0
        self._laggards: list[tuple[float, int]] | None = None
        self._laggards_of = -1

    @property
    def active(self) -> KeysView[int]:
        """The workers that take part, in the order they joined."""
        return self._completed.keys()

    @property
    def completed(self) -> Mapping[int, int]:
        """Each active worker's clock."""
        return MappingProxyType(self._completed)

    @property
    def samples(self) -> Mapping[int, int]:
        """Samples each worker has contributed."""
        return MappingProxyType(self._samples)

    @property
    def held(self) -> int:
        """Gradients kept for a later flush."""
        return self._held_count

    @property
    def waiting_count(self) -> int:
        """Workers that have pushed and are not yet released."""
        return self._waiting_count

    def clock(self, worker: int) -> int:
        """The worker's clock."""
        return self._completed[worker]

    def gap(self, worker: int) -> int:
        """How many iterations the worker is ahead of the slowest."""
        return self._completed[worker] - self.slowest

    def is_waiting(self, worker: int) -> bool:
        """Whether the worker has pushed and is not yet released."""
        bucket = self._waiting.get(self._completed.get(worker, -1))
        return bucket is not None and worker in bucket

    def staleness(self, worker: int) -> int:
        """Optimizer steps made since the worker read the weights."""
        return self.version - self._read[worker]

    def last_push_s(self, worker: int) -> float | None:
        """When the worker last pushed; None before its first push."""
        return self._last_push_s.get(worker)

    def interval_s(self, worker: int) -> float | None:
        """Time between the worker's last two pushes; None while unknown."""
        return self._interval_s.get(worker)

    def waiting(self, up_to: int | None = None) -> tuple[int, ...]:
        """Waiting workers whose clock is at most `up_to`: lowest clock first, then who waited first."""
        clocks = self._waiting_clocks
        end = len(clocks) if up_to is None else bisect_right(clocks, up_to)
        return tuple(worker for clock in clocks[:end] for worker in self._waiting[clock])

    def laggard(self) -> int:
        """The slowest worker; among equals the one whose next push is expected last."""
        if self._laggards is None or self._laggards_of != self.slowest:
            tied = (w for w, clock in self._completed.items() if clock == self.slowest)
            self._laggards = sorted((self._expected_s(w), w) for w in tied)
            self._laggards_of = self.slowest
        while self._completed.get(self._laggards[-1][1]) != self.slowest:
            self._laggards.pop()
        return self._laggards[-1][1]

    def _expected_s(self, worker: int) -> float:
        interval = self._interval_s.get(worker)
        return float("inf") if interval is None else self._last_push_s[worker] + interval


class ClockTable(Clocks):
    """The clock table as the pacer writes it."""

    def join(self, worker: int) -> None:
        """Let a worker take part; it starts computing on the current version."""
        clock = self._completed[worker] = self.slowest
        self._at[clock] = self._at.get(clock, 0) + 1
        self._samples.setdefault(worker, 0)
        self._read[worker] = self.version
        self._laggards = None

    def leave(self, worker: int) -> None:
        """Take a worker out, so that nobody waits for it. A gradient it left held stays held."""
        if self.is_waiting(worker):
            self.release(worker)
        clock = self._completed.pop(worker)
        self._last_push_s.pop(worker, None)
        self._interval_s.pop(worker, None)
        self._at[clock] -= 1
        self._settle_extremes()

    def push(self, worker: int, samples: int) -> None:
        """Count an iteration: the worker's clock ticks and it waits for its release."""
        clock = self._completed[worker]
        self._completed[worker] = clock + 1
        at = self._at
        at[clock] -= 1
        at[clock + 1] = at.get(clock + 1, 0) + 1
        if clock == self.slowest and not at[clock]:
            del at[clock]
            self.slowest = clock + 1
        if clock == self.fastest:
            self.fastest = clock + 1
        last = self._last_push_s.get(worker)
        if last is not None:
            self._interval_s[worker] = self.now - last
        self._last_push_s[worker] = self.now
        self._samples[worker] += samples
        self.pushes += 1
        bucket = self._waiting.get(clock + 1)
        if bucket is None:
            bucket = self._waiting[clock + 1] = {}
            insort(self._waiting_clocks, clock + 1)
        bucket[worker] = None
        self._waiting_count += 1

    def release(self, worker: int) -> None:
        """End a worker's wait; it reads the current version."""
        clock = self._completed[worker]
        bucket = self._waiting[clock]
        del bucket[worker]
        if not bucket:
            del self._waiting[clock]
            self._waiting_clocks.remove(clock)
        self._waiting_count -= 1
        self._read[worker] = self.version

    def hold(self, worker: int, weight: float) -> None:
        """Keep the worker's pushed gradient for a flush, added to those it already has there."""
        self._held[worker] = self._held.get(worker, 0.0) + weight
        self._held_count += 1

    def flush(self) -> dict[int, float]:
        """Hand out the held gradients' owners and summed weights, in rank order."""
        held = dict(sorted(self._held.items()))
        self._held, self._held_count = {}, 0
        return held

    def _settle_extremes(self) -> None:
        if not self._completed:
            return
        while not self._at.get(self.slowest):
            self._at.pop(self.slowest, None)
            self.slowest += 1
        while not self._at.get(self.fastest):
            self._at.pop(self.fastest, None)
            self.fastest -= 1
