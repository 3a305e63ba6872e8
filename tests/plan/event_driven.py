"""Asynchronous training on a bowl, event by event: the simulator's cluster and clockwork, the real pacer.

What the advisor predicts is compared with this, which knows nothing of delay equations.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import numpy as np
from numpy.typing import NDArray

from paceline.protocols import PACED, Pacer
from paceline.sim import Cluster, Timing

Numbers = NDArray[np.float64]


def asynchronous(
    cluster: Cluster,
    seed: int,
    until_s: float,
    push: Callable[[int, float, int], None],
    read: Callable[[int, float], None],
) -> Pacer:
    """Run asp: `push` takes worker, time and staleness of every gradient, `read` who read when."""
    pacer, timing = Pacer(PACED["asp"]()), Timing(cluster, seed)
    order, heap = count(), list[tuple[float, int, int]]()

    def begin(worker: int, now: float) -> None:
        read(worker, now)
        begin_s = now + timing.pull_s(worker)
        done_s = begin_s + timing.compute_s(worker, begin_s) + timing.push_s(worker)
        heappush(heap, (done_s, next(order), worker))

    for worker in range(cluster.workers):
        pacer.join(worker, 0.0)
        begin(worker, 0.0)
    while heap[0][0] < until_s:
        now, _, worker = heappop(heap)
        decision = pacer.push(worker, now)
        push(worker, now, decision.staleness)
        for released in decision.release:
            begin(released, now)
    return pacer


class Bowl:
    """x <- x - step * (curvature * x_read + noise), for one asynchronous run."""

    def __init__(self, step: float, curvature: float, noise: float, workers: int, seed: int = 0) -> None:
        self.x = 1.0
        self._step, self._curvature, self._deviation = step, curvature, noise**0.5
        self._read = [1.0] * workers
        self._random = np.random.default_rng(seed)
        self.times: list[float] = []
        self.values: list[float] = []
        self.staleness: list[int] = []

    def push(self, worker: int, now: float, staleness: int) -> None:
        noise = self._deviation * self._random.standard_normal() if self._deviation else 0.0
        self.x -= self._step * (self._curvature * self._read[worker] + noise)
        self.times.append(now)
        self.values.append(self.x)
        self.staleness.append(staleness)

    def read(self, worker: int, now: float) -> None:
        self._read[worker] = self.x


def mean_path(cluster: Cluster, step_curvature: float, cycles: int, runs: int) -> tuple[Numbers, list[int]]:
    """E[x] after each update over many noise-free runs, and the staleness seen, once the start is over."""
    updates = cycles * cluster.workers
    total, stale = np.zeros(updates), list[int]()
    for seed in range(runs):
        bowl = Bowl(step_curvature, 1.0, 0.0, cluster.workers)
        asynchronous(cluster, seed, 1.5 * cycles, bowl.push, bowl.read)
        total += np.array(bowl.values[:updates]) / runs
        stale += bowl.staleness[2 * cluster.workers :]
    return total, stale


def decay_of(path: Numbers, every: int = 1) -> float:
    """The rate per update of the slower of two modes fitted to a path; a pair when it oscillates."""
    seen = path[::every]
    (a, b), *_ = np.linalg.lstsq(np.stack([seen[1:-1], seen[:-2]], 1), seen[2:], rcond=None)
    return -float(np.log(np.abs(np.roots([1, -a, -b])).max())) / every
