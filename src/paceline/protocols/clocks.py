"""The clock table: who has completed how many iterations, who waits, since when.

What all paced protocols share lives here once. A protocol sees `Clocks`, which only reads; the
pacer alone holds the `ClockTable` and writes. A *clock* is the number of iterations a worker has
completed and pushed. Every answer is amortised O(log n) in the number of workers.

A worker that joins late, or comes back, starts at the clock of the slowest. So `slowest` never
falls, nobody is thrown back by a newcomer, and no newcomer is ahead of what a protocol allows: at
its own earlier clock, one that died while it waited would start the iteration it was refused.

A worker that waits may be set aside (*benched*): it stays in the run and asleep, but nobody waits
for it. Released, it takes part again as a newcomer does.
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
        """Pushes received so far, and `resumed_pushes`."""
        self.resumed_pushes = 0
        """Pushes that were received before the run was interrupted and resumed."""
        self.total_samples = 0
        """Samples behind all pushes so far, whoever made them, and `resumed_samples`."""
        self.resumed_samples = 0
        """Samples that were processed before the run was interrupted and resumed."""
        self.planned: int | None = None
        """Samples the whole run is going to process; None while nobody has said."""
        self.slowest = 0
        """The smallest clock among active workers."""
        self.fastest = 0
        """The largest clock among active workers."""
        self.left: int | None = None
        """Who left, when that is the event being judged: what a rule remembers of it is to be forgotten."""
        self._completed: dict[int, int] = {}
        self._last_push_s: dict[int, float] = {}
        self._push_before_s: dict[int, float] = {}
        self._released_s: dict[int, float] = {}
        self._read: dict[int, int] = {}
        self._held: dict[int, float] = {}
        self._held_count = 0
        self._at: dict[int, int] = {}
        self._below: dict[int, int] = {}
        self._newcomer: int | None = None  # waits, but does not stand in the row yet: most never do
        self._waiting: dict[int, dict[int, None]] = {}
        self._waiting_clocks: list[int] = []
        self._waiting_count = 0
        self._laggards: list[tuple[float, int]] | None = None
        self._laggards_of = -1
        self._benched: dict[int, int] = {}

    @property
    def active(self) -> KeysView[int]:
        """The workers that take part, in the order they joined."""
        return self._completed.keys()

    @property
    def completed(self) -> Mapping[int, int]:
        """Each active worker's clock."""
        return MappingProxyType(self._completed)

    @property
    def batch(self) -> float:
        """Samples behind a push, on average; 0 before the first."""
        pushes = self.pushes - self.resumed_pushes
        return (self.total_samples - self.resumed_samples) / pushes if pushes else 0.0

    @property
    def benched(self) -> KeysView[int]:
        """The workers that are set aside, first come first: asleep, and not active."""
        return self._benched.keys()

    @property
    def held(self) -> int:
        """Gradients kept for a later flush."""
        return self._held_count

    @property
    def waiting_count(self) -> int:
        """Workers that have pushed and are not yet released."""
        return self._waiting_count

    def clock(self, worker: int) -> int:
        """The worker's clock; of one that is set aside, the clock it had."""
        return self._completed[worker] if worker in self._completed else self._benched[worker]

    def gap(self, worker: int) -> int:
        """How many iterations the worker is ahead of the slowest."""
        return self._completed[worker] - self.slowest

    def lead(self, workers: tuple[int, ...]) -> int:
        """The largest gap among these."""
        if len(workers) == 1:
            return self._completed[workers[0]] - self.slowest
        return max(map(self._completed.__getitem__, workers)) - self.slowest

    def is_waiting(self, worker: int) -> bool:
        """Whether the worker has pushed and is not yet released; true of one that is set aside."""
        if worker == self._newcomer:
            return True
        bucket = self._waiting.get(self._completed.get(worker, -1))
        return worker in self._benched if bucket is None else worker in bucket

    def is_present(self, worker: int) -> bool:
        """Whether the worker is in the run, active or set aside."""
        return worker in self._completed or worker in self._benched

    def staleness(self, worker: int) -> int:
        """Optimizer steps made since the worker read the weights."""
        return self.version - self._read[worker]

    def last_push_s(self, worker: int) -> float | None:
        """When the worker last pushed; None before its first push."""
        return self._last_push_s.get(worker)

    def interval_s(self, worker: int) -> float | None:
        """Time between the worker's last two pushes; None while unknown."""
        before = self._push_before_s.get(worker)
        return None if before is None else self._last_push_s[worker] - before

    def run_s(self, worker: int) -> float | None:
        """What the push a worker waits with took from its release on: no waiting in it. None if unknown."""
        pushed = self._last_push_s.get(worker)
        return None if pushed is None or not self.is_waiting(worker) else pushed - self._released_s[worker]

    def waiting(self, up_to: int | None = None) -> tuple[int, ...]:
        """Waiting workers whose clock is at most `up_to`: lowest clock first, then who waited first."""
        newcomer, clocks = self._newcomer, self._waiting_clocks
        if not clocks or (up_to is not None and clocks[0] > up_to):  # nobody but the newcomer, if at all
            alone = newcomer is not None and (up_to is None or self._completed[newcomer] <= up_to)
            return (newcomer,) if alone else ()  # type: ignore[return-value]
        if newcomer is not None:
            self._line_up(newcomer)
        end = len(clocks) if up_to is None else bisect_right(clocks, up_to)
        return tuple(worker for clock in clocks[:end] for worker in self._waiting[clock])

    def count_below(self, clock: int) -> int:
        """Active workers whose clock is smaller. Once asked, an answer is kept right push by push."""
        if clock <= self.slowest:
            return 0
        count = self._below.get(clock)
        if count is None:
            self._below = {at: count for at, count in self._below.items() if at > self.slowest}
            count = self._below[clock] = sum(n for at, n in self._at.items() if at < clock)
        return count

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
        interval = self.interval_s(worker)
        return float("inf") if interval is None else self._last_push_s[worker] + interval

    def _line_up(self, worker: int) -> None:
        """Let the newcomer stand in the row of those who wait."""
        clock = self._completed[worker]
        bucket = self._waiting.get(clock)
        if bucket is None:
            bucket = self._waiting[clock] = {}
            insort(self._waiting_clocks, clock)
        bucket[worker] = None
        self._newcomer = None


class ClockTable(Clocks):
    """The clock table as the pacer writes it."""

    def join(self, worker: int) -> None:
        """Let a worker take part; it starts computing on the current version."""
        clock = self._completed[worker] = self.slowest
        self._at[clock] = self._at.get(clock, 0) + 1
        self._shift_below(clock, 1)
        self._read[worker] = self.version
        self._released_s[worker] = self.now
        self._laggards = None

    def leave(self, worker: int) -> None:
        """Take a worker out, so that nobody waits for it. A gradient it left held stays held."""
        if worker in self._benched:
            del self._benched[worker]
            return
        if self.is_waiting(worker):
            self.release(worker)
        clock = self._completed.pop(worker)
        self._last_push_s.pop(worker, None)
        self._push_before_s.pop(worker, None)
        self._at[clock] -= 1
        self._shift_below(clock, -1)
        self._settle_extremes()

    def push(self, worker: int, samples: int) -> None:
        """Count an iteration: the worker's clock ticks and it waits for its release."""
        clock = self._completed[worker]
        self._completed[worker] = clock + 1
        at = self._at
        at[clock] -= 1
        at[clock + 1] = at.get(clock + 1, 0) + 1
        if clock + 1 in self._below:
            self._below[clock + 1] -= 1
        if clock == self.slowest and not at[clock]:
            del at[clock]
            self.slowest = clock + 1
        if clock == self.fastest:
            self.fastest = clock + 1
        last = self._last_push_s.get(worker)
        if last is not None:
            self._push_before_s[worker] = last
        self._last_push_s[worker] = self.now
        self.total_samples += samples
        self.pushes += 1
        if self._newcomer is not None:
            self._line_up(self._newcomer)
        self._newcomer = worker
        self._waiting_count += 1

    def release(self, worker: int) -> None:
        """End a worker's wait; it reads the current version. One that was set aside takes part again."""
        if self._benched and worker in self._benched:
            del self._benched[worker]
            self.join(worker)
            return
        if worker == self._newcomer:
            self._newcomer = None
        else:
            self._step_out(worker)
        self._waiting_count -= 1
        self._read[worker] = self.version
        self._released_s[worker] = self.now

    def _step_out(self, worker: int) -> None:
        clock = self._completed[worker]
        bucket = self._waiting[clock]
        del bucket[worker]
        if not bucket:
            del self._waiting[clock]
            self._waiting_clocks.remove(clock)

    def bench(self, worker: int) -> None:
        """Set a waiting worker aside: it sleeps on, and nobody waits for it until it is released."""
        if not self.is_waiting(worker):
            raise KeyError(worker)
        clock = self._completed[worker]
        self.leave(worker)
        self._benched[worker] = clock

    def rebase(self) -> None:
        """Let all active workers have the clock of the fastest; who waits keeps its place in the row."""
        waiting, level = self.waiting(), self.fastest
        self._newcomer = None
        for worker in self._completed:
            self._completed[worker] = level
        if self._completed:
            self._at, self.slowest = {level: len(self._completed)}, level
        if waiting:
            self._waiting, self._waiting_clocks = {level: dict.fromkeys(waiting)}, [level]
        self._below, self._laggards = {}, None

    def resume(self, version: int, samples: int, pushes: int) -> None:
        """Go on counting from a checkpoint."""
        self.version, self.total_samples, self.pushes = version, samples, pushes
        self.resumed_samples, self.resumed_pushes = samples, pushes

    def hold(self, worker: int, weight: float) -> None:
        """Keep the worker's pushed gradient for a flush, added to those it already has there."""
        self._held[worker] = self._held.get(worker, 0.0) + weight
        self._held_count += 1

    def flush(self) -> dict[int, float]:
        """Hand out the held gradients' owners and summed weights, in rank order."""
        held = dict(sorted(self._held.items()))
        self._held, self._held_count = {}, 0
        return held

    def _shift_below(self, clock: int, change: int) -> None:
        for above in self._below:
            if above > clock:
                self._below[above] += change

    def _settle_extremes(self) -> None:
        if not self._completed:
            return
        while not self._at.get(self.slowest):
            self._at.pop(self.slowest, None)
            self.slowest += 1
        while not self._at.get(self.fastest):
            self._at.pop(self.fastest, None)
            self.fastest -= 1
