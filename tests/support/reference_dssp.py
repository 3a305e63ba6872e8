"""DSSP written a second time, as plainly as the paper's pseudo-code allows, to compare with.

Scans all workers and tries every pair of stops: slow, and with nothing in common with the protocol
under test. Told of each event, it answers with the set of workers that may go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def nearest_stop(
    last_p: float, interval_p: float, next_s: float, interval_s: float, most: int, limit: int
) -> int:
    """Algorithm 2 by its definition: the best of all pairs (stop of p, push of the slowest)."""
    pairs = [
        (abs((next_s + k * interval_s) - (last_p + r * interval_p)), r)
        for r in range(limit + 1)
        for k in range(most + 1)
    ]
    return min(pairs)[1]


@dataclass
class ReferenceDSSP:
    lower: int
    upper: int
    exact: bool = True
    """A grant of x starts x iterations; the printed algorithm starts x + 1."""
    bounded: bool = True
    """Nobody starts more than `upper` ahead."""
    next_push: bool = False
    """The slowest's next push ends a wait."""

    t: dict[int, int] = field(default_factory=dict)
    r: dict[int, int] = field(default_factory=dict)
    arrivals: dict[int, list[float]] = field(default_factory=dict)
    blocked: dict[int, int | None] = field(default_factory=dict)
    """Who waits, and whose push it waits for."""
    floor: int = 0

    def join(self, p: int) -> set[int]:
        self.t[p] = min(self.t.values(), default=self.floor)
        self.r[p], self.arrivals[p] = 0, []
        return self.unblock()

    def leave(self, p: int) -> set[int]:
        self.floor = min(self.t.values())
        del self.t[p]
        self.blocked.pop(p, None)
        for b in [b for b, awaited in self.blocked.items() if awaited == p]:
            self.blocked[b] = self.slowest_worker()
        return self.unblock()

    def push(self, p: int, now: float) -> set[int]:
        self.t[p] += 1
        self.arrivals[p].append(now)
        ok = self.ended_by_push_of(p)
        if self.r[p] > 0:
            self.r[p] -= 1
            ok.add(p)
        elif self.gap(p) <= self.lower:
            ok.add(p)
        elif self.t[p] == max(self.t.values()) and (x := self.controller(p)) > 0:
            self.r[p] = x - 1 if self.exact else x
            ok.add(p)
        else:
            self.blocked[p] = self.slowest_worker() if self.next_push else None
        return ok | self.unblock()

    def ended_by_push_of(self, p: int) -> set[int]:
        ok = set()
        for b in [b for b, awaited in self.blocked.items() if awaited == p]:
            if not self.bounded or self.gap(b) <= self.upper:
                del self.blocked[b]
                ok.add(b)
            else:
                self.blocked[b] = self.slowest_worker()
        return ok

    def unblock(self) -> set[int]:
        ok = {b for b in self.blocked if self.gap(b) <= self.lower}
        for b in ok:
            del self.blocked[b]
        return ok

    def controller(self, p: int) -> int:
        s = self.slowest_worker()
        if len(self.arrivals[p]) < 2 or len(self.arrivals[s]) < 2:
            return 0
        most = limit = self.upper - self.lower
        if self.bounded:
            limit = max(0, min(most, self.upper - self.gap(p) + 1))
        last_p, interval_p = self.arrivals[p][-1], self.arrivals[p][-1] - self.arrivals[p][-2]
        last_s, interval_s = self.arrivals[s][-1], self.arrivals[s][-1] - self.arrivals[s][-2]
        return nearest_stop(last_p, interval_p, last_s + interval_s, interval_s, most, limit)

    def slowest_worker(self) -> int:
        slowest = min(self.t.values())
        return max((self.next_arrival(i), i) for i in self.t if self.t[i] == slowest)[1]

    def next_arrival(self, i: int) -> float:
        times = self.arrivals[i]
        return 2 * times[-1] - times[-2] if len(times) > 1 else float("inf")

    def gap(self, p: int) -> int:
        return self.t[p] - min(self.t.values())
