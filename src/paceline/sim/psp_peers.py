"""PSP without a middle, in virtual time: who gets how far, and how many messages that takes.

Only control messages are told apart here: a look is one query to each peer of the sample and one
reply from each. A query is under way for `latency_s`, and so is the reply, which tells the peer's
clock at the moment the query reached it: when it is heard it may be out of date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

import msgspec

from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.sim.cluster import Cluster
from paceline.sim.compute import require
from paceline.sim.timing import Timing


class SampleLook(msgspec.Struct, frozen=True):
    """One look at a sample, at the moment its replies are heard."""

    t: float
    worker: int
    clock: int
    replies: dict[int, int]
    """What each peer said its clock was."""
    actual: dict[int, int]
    """And what it is by now."""
    passed: bool


class BarrierResult(msgspec.Struct):
    """What a run came to."""

    steps: list[int]
    """Iterations each worker completed."""
    asked: list[int]
    """Queries each worker received: a biased sample shows here."""
    wait_s: list[float]
    """Time each worker spent at its barriers."""
    looks: int = 0

    @property
    def queries(self) -> int:
        """Queries sent by all; each has one reply."""
        return sum(self.asked)


def simulate_barriers(
    barrier: PeerBarrier,
    cluster: Cluster,
    *,
    until_s: float,
    latency_s: float = 0.0,
    every_step: bool = False,
    seed: int = 0,
    heard: Callable[[SampleLook], None] | None = None,
) -> BarrierResult:
    """Let every worker of a cluster keep a barrier like this one, for `until_s` seconds.

    With `every_step` a waiting worker does not look again after `poll_s` seconds but whenever
    anybody completes a step, as if it were told; the telling itself is not counted. `heard` takes
    every look. The cluster's links carry weights and gradients, not control messages.
    """
    require(0 < until_s < inf, "until_s must be > 0", until_s, "It is when the run stops.")
    require(0 <= latency_s < inf, "latency_s must be >= 0", latency_s, "It is a message's time one way.")
    require(not cluster.event, "peers neither join nor leave here", cluster.event, "Leave the events out.")
    peers = _Peers(barrier, Timing(cluster, seed), cluster.workers, latency_s, every_step, heard)
    return peers.run(until_s)


class _Peers:
    """The workers, their barriers, and the messages under way."""

    def __init__(
        self,
        barrier: PeerBarrier,
        timing: Timing,
        workers: int,
        latency_s: float,
        every_step: bool,
        heard: Callable[[SampleLook], None] | None,
    ) -> None:
        self._members = range(workers)
        self._barriers = [replace(barrier, rank=worker) for worker in self._members]
        self._timing = timing
        self._latency_s = latency_s
        self._every_step = every_step
        self._heard = heard
        self._waits_since: dict[int, float] = {}
        self._idle: dict[int, None] = {}  # waiting, and no query under way
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._sequence = 0
        self._result = BarrierResult([0] * workers, [0] * workers, [0.0] * workers)

    def run(self, until_s: float) -> BarrierResult:
        for worker in self._members:
            self._compute(0.0, worker)
        while self._heap and self._heap[0][0] <= until_s:
            now, _, happen = heappop(self._heap)
            happen(now)
        for worker, since in self._waits_since.items():
            self._result.wait_s[worker] += until_s - since
        return self._result

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, happen))

    def _compute(self, now: float, worker: int) -> None:
        begin = now + self._timing.pull_s(worker)
        took = self._timing.compute_s(worker, begin) + self._timing.push_s(worker)
        self._at(begin + took, lambda then: self._complete(then, worker))

    def _complete(self, now: float, worker: int) -> None:
        self._result.steps[worker] += 1
        self._waits_since[worker] = now
        self._idle[worker] = None
        for looking in list(self._idle) if self._every_step else (worker,):
            self._look(now, looking)

    def _look(self, now: float, worker: int) -> None:
        del self._idle[worker]
        self._result.looks += 1
        sample = self._barriers[worker].whom_to_ask(self._members)
        if self._latency_s:
            self._at(now + self._latency_s, lambda then: self._reply(then, worker, sample))
        else:
            self._reply(now, worker, sample)

    def _reply(self, now: float, worker: int, sample: list[int]) -> None:
        replies = {peer: self._result.steps[peer] for peer in sample}
        for peer in sample:
            self._result.asked[peer] += 1
        if self._latency_s:
            self._at(now + self._latency_s, lambda then: self._hear(then, worker, replies))
        else:
            self._hear(now, worker, replies)

    def _hear(self, now: float, worker: int, replies: dict[int, int]) -> None:
        steps = self._result.steps
        passed = self._barriers[worker].hear(steps[worker], replies)
        if self._heard is not None:
            actual = {peer: steps[peer] for peer in replies}
            self._heard(SampleLook(now, worker, steps[worker], replies, actual, passed))
        if passed:
            self._result.wait_s[worker] += now - self._waits_since.pop(worker)
            self._compute(now, worker)
            return
        self._idle[worker] = None
        if not self._every_step:
            self._at(now + self._barriers[worker].poll_s, lambda then: self._look(then, worker))
