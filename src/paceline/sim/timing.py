"""How long things take on a cluster, drawn from a seed.

Each worker has random streams of its own, keyed by (seed, worker), so its times do not depend on
the order in which workers are asked: all protocols face the very same cluster, and a comparison
between them is fair. Times are drawn in blocks, since one draw of 64 costs little more than one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right

import numpy as np

from paceline.sim.cluster import Cluster, Profile, Stall, Transient
from paceline.sim.compute import require

BLOCK = 64
_COMPUTE, _PHASES = 0, 1


class Timing:
    """The clockwork of one run on one cluster."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        require(seed >= 0, "a seed must be >= 0", seed, "Use --seed 0, say.")
        self._seed = seed
        self._profiles = cluster.profiles()
        self._phases = _phases(self._profiles, seed)
        self._drifts = any(profile.drift for profile in self._profiles)
        self._stall, self._workers = cluster.stall, cluster.workers
        self._steady = not (self._drifts or self._phases or self._stall)
        self._exchange_s = _exchange_s(self._profiles, cluster.model_bytes or 0)
        self._streams: list[np.random.Generator | None] = [None] * cluster.workers
        # One row of times for each worker, in one piece: with ten thousand of them, the cache counts.
        self._times = array("d", bytes(8 * BLOCK * cluster.workers))
        self._rows = np.frombuffer(self._times).reshape(cluster.workers, BLOCK)
        self._next = bytearray([BLOCK]) * cluster.workers

    def compute_s(self, worker: int, now: float, batches: float = 1.0) -> float:
        """How long the worker's next iteration takes if it begins now, with so many batches' samples."""
        at = self._next[worker]
        if at == BLOCK:
            self._refill(worker)
            at = 0
        self._next[worker] = at + 1
        work = self._times[worker * BLOCK + at] * batches
        if self._steady:
            return work
        if self._drifts and (drift := self._profiles[worker].drift) is not None:
            work *= drift.at(now)
        if self._phases and worker in self._phases:
            work = self._phases[worker].stretched(work, now)
        return work if self._stall is None else stalled(self._stall, worker, self._workers, work, now)

    def push_s(self, worker: int) -> float:
        """How long a gradient is under way to the store."""
        return self._exchange_s[worker]

    def pull_s(self, worker: int) -> float:
        """How long the weights are under way to the worker."""
        return self._exchange_s[worker]

    def _refill(self, worker: int) -> None:
        """Draw the worker's next iterations, as they are outside slow phases."""
        profile, rng = self._profiles[worker], self._streams[worker]
        if rng is None:
            rng = self._streams[worker] = np.random.default_rng((self._seed, worker, _COMPUTE))
        self._rows[worker] = profile.compute.draw(rng, BLOCK, worker) * profile.slow


def _exchange_s(profiles: list[Profile], size_bytes: int) -> list[float]:
    """Per rank, how long a message of the model's size takes; like links share one number."""
    seconds = {link: link.seconds(size_bytes) for link in {profile.link for profile in profiles}}
    return [seconds[profile.link] for profile in profiles]


def _phases(profiles: list[Profile], seed: int) -> dict[int, _Phases]:
    """Of each rank that has slow phases."""
    slow = ((rank, profile.transient) for rank, profile in enumerate(profiles))
    return {rank: _Phases(transient, seed, rank) for rank, transient in slow if transient is not None}


def stalled(stall: Stall, rank: int, workers: int, work: float, now: float) -> float:
    """How long work takes from now on, including the rank's stalls."""
    if rank == 0:
        return work
    number, end = max(0, int((now / stall.every_s - rank) / (workers - 1))), now + work
    while True:
        begins, ends = stall.of(rank, workers, number)
        if begins >= end:
            return end - now
        end += max(0.0, ends - max(begins, now))
        number += 1


class _Phases:
    """A worker's time line, cut into usual and slow phases by turns.

    The cuts belong to the worker's seed alone; when and how often it is asked moves none of them.
    A worker is as likely to begin in a slow phase as to be in one at any later time.
    """

    def __init__(self, transient: Transient, seed: int, rank: int) -> None:
        slow, usual = transient.mean_length_s, transient.mean_gap_s
        self._rng = np.random.default_rng((seed, rank, _PHASES))
        slow_first = self._rng.random() < slow / (slow + usual)
        self._mean_s = (slow, usual) if slow_first else (usual, slow)
        self._pace = (transient.factor, 1.0) if slow_first else (1.0, transient.factor)
        self._ends: list[float] = []

    def stretched(self, work: float, now: float) -> float:
        """How long that much work takes from now on, slow phases passed through included."""
        spent, phase = 0.0, self._phase_at(now)
        while True:
            pace, left = self._pace[phase % 2], self._end(phase) - now - spent
            if work * pace <= left:
                return spent + work * pace
            work -= left / pace
            spent += left
            phase += 1

    def _phase_at(self, now: float) -> int:
        while not self._ends or self._ends[-1] <= now:
            self._extend()
        return bisect_right(self._ends, now)

    def _end(self, phase: int) -> float:
        if phase == len(self._ends):
            self._extend()
        return self._ends[phase]

    def _extend(self) -> None:
        lengths = self._rng.exponential(1.0, (BLOCK // 2, 2)) * self._mean_s
        last = self._ends[-1] if self._ends else 0.0
        self._ends.extend((last + np.cumsum(lengths)).tolist())
