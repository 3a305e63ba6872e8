"""The clock table: who has completed how many iterations, who waits, since when.

What all paced protocols share lives here once. A protocol sees `Clocks`, which only reads; the
pacer alone holds the `ClockTable` and writes. A *clock* is the number of iterations a worker has
completed and pushed. Every answer is amortised O(log n) in the number of workers.

A worker that joins late, or comes back, starts at the clock of the slowest. So `slowest` never falls, a
newcomer holds back no other worker, and no newcomer is ahead of what a protocol allows. At its own earlier
clock, a worker that died while waiting would start the iteration it was refused.

A waiting worker may be set aside (*benched*): it stays in the run and sleeps, and no worker waits for it.
When released, it takes part again like a newcomer.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, KeysView, Mapping
from copy import deepcopy
from math import inf
from typing import Any


class ClockEntry:
    """The table's entry for one active worker, in one place because of the CPU cache with thousands of
    workers."""

    __slots__ = ("clock", "last_push_s", "push_before_s", "read", "released_s", "worker")

    def __init__(self, worker: int, clock: int, read: int, released_s: float) -> None:
        self.worker = worker
        self.clock = clock
        self.last_push_s: float | None = None
        self.push_before_s: float | None = None
        self.read = read
        self.released_s = released_s


class Completed(Mapping[int, int]):
    """Each member's current clock."""

    def __init__(self, members: dict[int, ClockEntry]) -> None:
        self._members = members

    def __getitem__(self, worker: int) -> int:
        return self._members[worker].clock

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)


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
        """Samples of all pushes so far, including `resumed_samples`."""
        self.resumed_samples = 0
        """Samples that were processed before the run was interrupted and resumed."""
        self.planned: int | None = None
        """Samples the whole run will process; None while unknown."""
        self.slowest = 0
        """The smallest clock among active workers."""
        self.fastest = 0
        """The largest clock among active workers."""
        self.left: int | None = None
        """The worker that left, if that is the current event. A rule should forget what it remembers of
        it."""
        self.held = 0
        """Gradients kept for a later flush."""
        self.waiting_count = 0
        """Workers that have pushed and are not yet released."""
        self._members: dict[int, ClockEntry] = {}
        self.active: KeysView[int] = self._members.keys()
        """The workers that take part, in the order they joined."""
        self._benched: dict[int, int] = {}
        self.benched: KeysView[int] = self._benched.keys()
        """The workers that are set aside (asleep and not active), in the order they were set aside."""
        self._held: dict[int, float] = {}
        self._at: dict[int, int] = {}
        self._below: dict[int, int] = {}
        self._newcomer: ClockEntry | None = None  # waits, but does not stand in the row yet: most never do
        self._waiting: dict[int, dict[int, None]] = {}
        self._waiting_clocks: list[int] = []
        self._laggards: list[tuple[float, int]] | None = None
        self._laggards_of = -1

    @property
    def completed(self) -> Mapping[int, int]:
        """Each active worker's clock."""
        return Completed(self._members)

    @property
    def batch(self) -> float:
        """Average number of samples per push; 0 before the first."""
        pushes = self.pushes - self.resumed_pushes
        return (self.total_samples - self.resumed_samples) / pushes if pushes else 0.0

    def clock(self, worker: int) -> int:
        """The worker's clock; of one that is set aside, the clock it had."""
        member = self._members.get(worker)
        return self._benched[worker] if member is None else member.clock

    def gap(self, worker: int) -> int:
        """How many iterations the worker is ahead of the slowest."""
        return self._members[worker].clock - self.slowest

    def is_waiting(self, worker: int) -> bool:
        """Whether the worker has pushed and is not yet released; true of one that is set aside."""
        member = self._members.get(worker)
        if member is not None and member is self._newcomer:
            return True
        return worker in self._benched if member is None else worker in self._waiting.get(member.clock, ())

    def is_present(self, worker: int) -> bool:
        """Whether the worker is in the run, active or set aside."""
        return worker in self._members or worker in self._benched

    def staleness(self, worker: int) -> int:
        """Optimizer steps made since the worker read the weights."""
        return self.version - self._members[worker].read

    def last_push_s(self, worker: int) -> float | None:
        """When the worker last pushed; None before its first push."""
        member = self._members.get(worker)
        return None if member is None else member.last_push_s

    def interval_s(self, worker: int) -> float | None:
        """Time between the worker's last two pushes; None while unknown."""
        member = self._members.get(worker)
        if member is None or member.last_push_s is None or member.push_before_s is None:
            return None
        return member.last_push_s - member.push_before_s

    def run_s(self, worker: int) -> float | None:
        """Time from a waiting worker's last release to its push, without waiting. None if unknown."""
        member = self._members.get(worker)
        if member is None or member.last_push_s is None or not self.is_waiting(worker):
            return None
        return member.last_push_s - member.released_s

    def waiting(self, up_to: int | None = None) -> tuple[int, ...]:
        """Waiting workers whose clock is at most `up_to`: lowest clock first, then longest wait first."""
        newcomer, clocks = self._newcomer, self._waiting_clocks
        if not clocks or (up_to is not None and clocks[0] > up_to):  # nobody but the newcomer, if at all
            alone = newcomer is not None and (up_to is None or newcomer.clock <= up_to)
            return (newcomer.worker,) if newcomer is not None and alone else ()
        if newcomer is not None:
            self._line_up(newcomer)
            self._newcomer = None
        end = len(clocks) if up_to is None else bisect_right(clocks, up_to)
        return tuple(worker for clock in clocks[:end] for worker in self._waiting[clock])

    def count_below(self, clock: int) -> int:
        """Active workers whose clock is smaller. After the first call the answer is updated at each push."""
        count = self._below.get(clock)
        if count is not None:
            return count
        if clock <= self.slowest:
            return 0
        self._below = {at: count for at, count in self._below.items() if at > self.slowest}
        count = self._below[clock] = sum(n for at, n in self._at.items() if at < clock)
        return count

    def laggard(self) -> int:
        """The slowest worker; among equals the one whose next push is expected last."""
        if self._laggards is None or self._laggards_of != self.slowest:
            tied = (w for w, member in self._members.items() if member.clock == self.slowest)
            self._laggards = sorted((self._expected_s(w), w) for w in tied)
            self._laggards_of = self.slowest
        while True:
            worker = self._laggards[-1][1]
            member = self._members.get(worker)
            if member is not None and member.clock == self.slowest:
                return worker
            self._laggards.pop()

    def _expected_s(self, worker: int) -> float:
        last, interval = self.last_push_s(worker), self.interval_s(worker)
        return inf if last is None or interval is None else last + interval

    def _line_up(self, member: ClockEntry) -> None:
        """Put a worker into the order of waiting workers."""
        clock = member.clock
        bucket = self._waiting.get(clock)
        if bucket is None:
            bucket = self._waiting[clock] = {}
            insort(self._waiting_clocks, clock)
        bucket[member.worker] = None


class ClockTable(Clocks):
    """The clock table as the pacer writes it."""

    def join(self, worker: int) -> None:
        """Let a worker take part; it starts computing on the current version."""
        clock = self.slowest
        self._members[worker] = ClockEntry(worker, clock, self.version, self.now)
        self._at[clock] = self._at.get(clock, 0) + 1
        self._shift_below(clock, 1)
        self._laggards = None

    def leave(self, worker: int) -> None:
        """Remove a worker, so that no worker waits for it. Its held gradient stays held."""
        if worker in self._benched:
            del self._benched[worker]
            return
        if self.is_waiting(worker):
            self.release(worker)
        clock = self._members.pop(worker).clock
        self._at[clock] -= 1
        self._shift_below(clock, -1)
        self._settle_extremes()

    def push(self, worker: int, samples: int) -> int:
        """Count an iteration: the worker's clock ticks and it waits for its release.

        The answer is the version the worker had read.
        """
        member, at = self._members[worker], self._at
        clock = member.clock
        member.clock = ticked = clock + 1
        member.push_before_s, member.last_push_s = member.last_push_s, self.now
        if clock == self.fastest:
            self.fastest = ticked
            at[ticked] = 1
        else:  # every clock from the slowest to the fastest has an entry
            at[ticked] += 1
        at[clock] -= 1
        if clock == self.slowest and not at[clock]:
            del at[clock]
            self.slowest = ticked
        if ticked in self._below:
            self._below[ticked] -= 1
        self.total_samples += samples
        self.pushes += 1
        earlier, self._newcomer = self._newcomer, member
        if earlier is not None:
            self._line_up(earlier)
        self.waiting_count += 1
        return member.read

    def release(self, worker: int) -> None:
        """End a worker's wait; it reads the current version. One that was set aside takes part again."""
        self.let_go((worker,))

    def let_go(self, workers: tuple[int, ...]) -> int:
        """Release all of these. The answer is the largest lead over the slowest among them."""
        newcomer = self._newcomer
        if newcomer is not None and workers == (newcomer.worker,):  # the usual case, by a short way
            self._newcomer = None
            self.waiting_count -= 1
            newcomer.read, newcomer.released_s = self.version, self.now
            return newcomer.clock - self.slowest
        version, now, furthest = self.version, self.now, self.slowest
        members, benched = self._members, self._benched
        for worker in workers:
            if benched and worker in benched:
                del benched[worker]
                self.join(worker)
                continue
            member = members[worker]
            if member is newcomer:
                self._newcomer = newcomer = None
            else:
                self._step_out(worker, member.clock)
            self.waiting_count -= 1
            member.read, member.released_s = version, now
            if member.clock > furthest:
                furthest = member.clock
        return furthest - self.slowest

    def _step_out(self, worker: int, clock: int) -> None:
        bucket = self._waiting[clock]
        del bucket[worker]
        if not bucket:
            del self._waiting[clock]
            self._waiting_clocks.remove(clock)

    def bench(self, worker: int) -> None:
        """Set a waiting worker aside: it sleeps until it is released, and no worker waits for it."""
        if not self.is_waiting(worker):
            raise KeyError(worker)
        clock = self._members[worker].clock
        self.leave(worker)
        self._benched[worker] = clock

    def rebase(self) -> None:
        """Set all active workers to the clock of the fastest. Waiting workers keep their order."""
        waiting, level = self.waiting(), self.fastest
        self._newcomer = None
        for member in self._members.values():
            member.clock = level
        if self._members:
            self._at, self.slowest = {level: len(self._members)}, level
        if waiting:
            self._waiting, self._waiting_clocks = {level: dict.fromkeys(waiting)}, [level]
        self._below, self._laggards = {}, None

    def __deepcopy__(self, memo: dict[int, Any]) -> ClockTable:
        twin = ClockTable()
        views = ("active", "benched")  # of dictionaries that the twin has its own of
        own = {name: value for name, value in vars(self).items() if name not in views}
        vars(twin).update(deepcopy(own, memo))
        twin.active, twin.benched = twin._members.keys(), twin._benched.keys()
        return twin

    def resume(self, version: int, samples: int, pushes: int) -> None:
        """Continue counting from a checkpoint."""
        self.version, self.total_samples, self.pushes = version, samples, pushes
        self.resumed_samples, self.resumed_pushes = samples, pushes

    def hold(self, worker: int, weight: float) -> None:
        """Keep the worker's pushed gradient for a flush, added to those it already has there."""
        self._held[worker] = self._held.get(worker, 0.0) + weight
        self.held += 1

    def flush(self) -> dict[int, float]:
        """Hand out the held gradients' owners and summed weights, in rank order."""
        held = dict(sorted(self._held.items()))
        self._held, self.held = {}, 0
        return held

    def _shift_below(self, clock: int, change: int) -> None:
        for above in self._below:
            if above > clock:
                self._below[above] += change

    def _settle_extremes(self) -> None:
        if not self._members:
            return
        while not self._at.get(self.slowest):
            self._at.pop(self.slowest, None)
            self.slowest += 1
        while not self._at.get(self.fastest):
            self._at.pop(self.fastest, None)
            self.fastest -= 1
