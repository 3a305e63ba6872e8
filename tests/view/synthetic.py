"""Synthetic runs: the real pacer in a small loop of virtual time, its decisions written as a trace."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.protocols import Decision, Pacer
from paceline.protocols.settings import make, resolved
from paceline.trace import TraceWriter
from paceline.trace.events import (
    SCHEMA,
    AnyEvent,
    Decided,
    Evaluated,
    ModelReady,
    Note,
    Reported,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLeft,
)

BATCH = 32
EXCHANGE_S = 0.012


class SyntheticRun:
    """A run whose loss falls with the samples done, and a little slower the staler the gradients."""

    def __init__(
        self,
        protocol: str,
        *,
        run: str = "run",
        workers: int = 4,
        pushes: int = 400,
        slow: dict[int, float] | None = None,
        dies: tuple[int, int] | None = None,
        seed: int = 7,
        **settings: Any,
    ) -> None:
        self.pacer = Pacer(make(protocol, settings))
        self.protocol, self.run, self.workers, self.pushes = protocol, run, workers, pushes
        self.slow, self.dies, self.seed = slow or {}, dies, seed
        self.random = random.Random(seed)
        self.samples, self.learnt = 0, 0.0
        self.arrivals: list[tuple[float, int, float]] = []

    def events(self) -> Iterator[AnyEvent]:
        """The whole trace."""
        yield self._started()
        yield ModelReady(0.0, 25_000, 100_000, 100_000, samples_per_epoch=3200, batches_per_epoch=100)
        for rank in range(self.workers):
            yield WorkerJoined(0.0, rank)
            yield self._decided(self.pacer.join(rank, 0.0), 0.0)
            self._compute(rank, 0.0)
        now = 0.0
        for number in range(1, self.pushes + 1):
            now, rank, compute_s = heapq.heappop(self.arrivals)
            if self.dies is not None and (rank, number > self.dies[1]) == (self.dies[0], True):
                yield from self._die(rank, now)
                continue
            yield from self._push(rank, now, compute_s, number)
        yield from self._finish(now)

    def _started(self) -> RunStarted:
        emulated = {"slow": {str(rank): factor for rank, factor in self.slow.items()}} if self.slow else None
        settings, at = resolved(self.pacer.protocol), "2025-01-01T12:00:00+00:00"
        head = (0.0, SCHEMA, self.run, self.protocol, settings, self.workers, self.seed, False, at)
        return RunStarted(*head, script="digits.py", target=0.9, emulated=emulated)

    def _compute(self, rank: int, start: float) -> None:
        compute_s = 0.1 * self.slow.get(rank, 1.0) * self.random.uniform(0.9, 1.15)
        heapq.heappush(self.arrivals, (start + compute_s, rank, compute_s))

    def _push(self, rank: int, now: float, compute_s: float, number: int) -> Iterator[AnyEvent]:
        decision = self.pacer.push(rank, now, BATCH)
        self.samples += BATCH
        self.learnt += BATCH / (1 + 0.05 * decision.staleness)
        yield self._decided(decision, now, rank, compute_s)
        for released in decision.release:
            self._compute(released, now + EXCHANGE_S)
        if number % 4 == 0:
            loss = self._loss() * self.random.uniform(0.85, 1.2)
            yield Reported(now, rank, self.pacer.clocks.clock(rank), {"loss": loss})
        if number % 40 == 0:
            values = {"loss": self._loss(), "accuracy": 0.97 - 0.87 * (self._loss() - 0.1) / 2.2}
            yield Evaluated(now, 0, decision.version, self.samples, values, 0.02)

    def _loss(self) -> float:
        return 0.1 + 2.2 * float(2 ** (-self.learnt / 2500))

    def _die(self, rank: int, now: float) -> Iterator[AnyEvent]:
        self.dies = None
        yield WorkerLeft(now, rank, "died", "killed by signal 9", BATCH)
        yield Note(now, "warning", f"rank {rank} is gone; the others go on")
        decision = self.pacer.leave(rank, now)
        yield self._decided(decision, now)
        for released in decision.release:
            self._compute(released, now + EXCHANGE_S)

    def _finish(self, now: float) -> Iterator[AnyEvent]:
        for rank in list(self.pacer.clocks.active):
            yield WorkerLeft(now, rank, "finished")
            yield self._decided(self.pacer.leave(rank, now), now)
        yield RunEnded(now, "finished")

    def _decided(
        self, decision: Decision, now: float, pushed: int | None = None, compute_s: float = 0.0
    ) -> Decided:
        pushing: dict[str, Any] = {}
        if pushed is not None:
            clock = self.pacer.clocks.clock(pushed)
            pushing = {"clock": clock, "samples": BATCH, "compute_s": compute_s, "exchange_s": EXCHANGE_S}
        return Decided(
            now,
            decision.number,
            pushed,
            decision.version,
            fate=decision.fate.value if decision.fate else None,
            flush=decision.flush.value if decision.flush else None,
            flushed=tuple(decision.flushed),
            release=decision.release,
            staleness=decision.staleness,
            gap=decision.gap,
            **pushing,
        )


def write_run(folder: Path, run: SyntheticRun) -> Path:
    """Write a synthetic run as a run folder."""
    folder.mkdir(parents=True)
    writer = TraceWriter(folder / "trace.jsonl")
    for event in run.events():
        writer.write(event)
    writer.close()
    return folder
