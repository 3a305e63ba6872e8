"""ElasticBSP written a second time, plainly: everything is kept, everything is scanned, all choices tried."""

from __future__ import annotations

from itertools import product
from typing import Any


class ReferenceElasticBSP:
    """One superstep after another; every method returns who is released."""

    def __init__(self, lookahead: int, monitor: str, max_superstep: int, **ignored: Any) -> None:
        self.lookahead, self.monitor, self.cap = lookahead, monitor, max_superstep
        self.times: dict[int, list[float]] = {}
        self.made: dict[int, int] = {}
        self.stop: dict[int, int] = {}
        self.waiting: set[int] = set()
        self.monitoring = monitor == "free"
        self.started: dict[int, float] = {}

    def join(self, worker: int, now: float) -> set[int]:
        self.times[worker], self.made[worker], self.started[worker] = [], 0, now
        return self.settle(now)

    def leave(self, worker: int, now: float) -> set[int]:
        for table in (self.times, self.made, self.stop):
            table.pop(worker, None)
        self.waiting.discard(worker)
        return self.settle(now)

    def push(self, worker: int, now: float) -> set[int]:
        self.times[worker].append(now)
        self.made[worker] += 1
        self.waiting.add(worker)
        released = self.settle(now)
        if worker in self.waiting and not self.is_last(worker):
            self.waiting.discard(worker)
            released = released | {worker}
        self.started.update(dict.fromkeys(released, now))
        return released

    def is_last(self, worker: int) -> bool:
        quota_used = not self.monitoring and self.made[worker] >= self.stop.get(worker, 1)
        return quota_used or 0 < self.cap <= self.made[worker]

    def settle(self, now: float) -> set[int]:
        if self.monitoring and self.times and all(made >= 2 for made in self.made.values()):
            last = {w: times[-1] for w, times in self.times.items()}
            quotas = self.quotas(last, {w: times[-1] - times[-2] for w, times in self.times.items()}, now)
            self.stop = {w: self.made[w] + quota for w, quota in quotas.items()}
            self.monitoring = False
        if self.waiting != self.times.keys() or not all(map(self.is_last, self.waiting)):
            return set()
        released, self.waiting = self.waiting, set()
        self.monitoring = self.monitor == "free"
        self.stop = {} if self.monitoring else self.carried_over(now)
        self.made = dict.fromkeys(self.made, 0)
        self.started.update(dict.fromkeys(released, now))
        return released

    def carried_over(self, now: float) -> dict[int, int]:
        if self.monitor == "carry_over":
            ran = {w: times[-1] - self.started[w] for w, times in self.times.items()}
            return self.quotas(dict.fromkeys(ran, now), ran, now)
        if any(len(times) < 2 for times in self.times.values()):
            return {}
        last = {w: times[-1] for w, times in self.times.items()}
        return self.quotas(last, {w: times[-1] - times[-2] for w, times in self.times.items()}, now)

    def quotas(self, last: dict[int, float], interval: dict[int, float], now: float) -> dict[int, int]:
        first = {w: max(now, last[w] + interval[w]) for w in last}
        counts = range(1, self.lookahead + 1)
        ends = {w: [first[w] + (i - 1) * interval[w] for i in counts] for w in last}
        choices = [dict(zip(ends, choice, strict=True)) for choice in product(counts, repeat=len(ends))]
        return min(choices, key=lambda choice: _closeness(ends, choice), default={})


def _closeness(ends: dict[int, list[float]], choice: dict[int, int]) -> Any:
    chosen = [ends[w][i - 1] for w, i in choice.items()]
    return max(chosen, default=0) - min(chosen, default=0), min(chosen, default=0), list(choice.values())
