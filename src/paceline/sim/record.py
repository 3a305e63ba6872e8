"""What a simulated run writes: every decision, or only what they add up to.

Both ways give the same result. Writing a million decisions costs more time than deciding them, so
large runs are summed up: about 200 `Progress` events and one `Totals`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from paceline.protocols import Clocks, Decision
from paceline.trace import Tally
from paceline.trace.events import AnyEvent, Decided, Progress, RunEnded, Totals, WorkerJoined, WorkerLeft

Emit = Callable[[AnyEvent], None]
Reason = Literal["finished", "died"]
Status = Literal["finished", "failed"]

PROGRESS_EVENTS = 200


class Record(Protocol):
    """Takes what happens, in the order of time."""

    def joined(self, now: float, worker: int) -> None:
        """A worker takes part."""
        ...

    def left(self, now: float, worker: int, reason: Reason, unfinished: int) -> None:
        """A worker takes part no longer."""
        ...

    def pushed(self, now: float, decision: Decision, worker: int, compute_s: float, position: int) -> None:
        """A push was judged."""
        ...

    def asked(self, now: float, decision: Decision) -> None:
        """The protocol was asked without a push."""
        ...

    def ended(self, now: float, status: Status, detail: str) -> None:
        """The run is over."""
        ...


class Full:
    """Writes every decision."""

    def __init__(self, emit: Emit, clocks: Clocks, batch: int, exchange_s: list[float]) -> None:
        self._emit = emit
        self._clocks = clocks
        self._batch = batch
        self._exchange_s = exchange_s
        self._version = 0

    def joined(self, now: float, worker: int) -> None:
        self._emit(WorkerJoined(now, worker))

    def left(self, now: float, worker: int, reason: Reason, unfinished: int) -> None:
        self._emit(_left(now, worker, reason, unfinished))

    def pushed(self, now: float, decision: Decision, worker: int, compute_s: float, position: int) -> None:
        self._emit(
            Decided(
                now,
                decision.number,
                worker,
                decision.version,
                fate=decision.fate.value if decision.fate else None,
                flush=decision.flush.value if decision.flush else None,
                flushed=tuple(decision.flushed),
                release=decision.release,
                clock=self._clocks.clock(worker),
                samples=self._batch,
                read=self._version - decision.staleness,
                staleness=decision.staleness,
                gap=decision.gap,
                lr_scale=decision.lr_scale,
                compute_s=compute_s,
                exchange_s=self._exchange_s[worker],
                work=((0, position * self._batch, self._batch),),
            )
        )
        self._version = decision.version

    def asked(self, now: float, decision: Decision) -> None:
        self._emit(
            Decided(
                now,
                decision.number,
                None,
                decision.version,
                flush=decision.flush.value if decision.flush else None,
                flushed=tuple(decision.flushed),
                release=decision.release,
                gap=decision.gap,
            )
        )
        self._version = decision.version

    def ended(self, now: float, status: Status, detail: str) -> None:
        self._emit(RunEnded(now, status, detail))


class Summary:
    """Adds decisions up and writes where the run stands from time to time."""

    def __init__(
        self, emit: Emit, clocks: Clocks, batch: int, workers: int, total: int, tally: Tally
    ) -> None:
        self._emit = emit
        self._clocks = clocks
        self._batch = batch
        self._tally = tally
        self._every = max(1, total // PROGRESS_EVENTS)
        self._next = self._every
        self._max_gap = 0
        self._staleness: dict[int, int] = {}
        self._compute_s = [0.0] * workers
        self._wait_s = [0.0] * workers
        self._waits_since: list[float | None] = [None] * workers
        self._since = [0.0] * workers
        self._present_s = [0.0] * workers

    def joined(self, now: float, worker: int) -> None:
        self._since[worker] = now
        self._emit(WorkerJoined(now, worker))

    def left(self, now: float, worker: int, reason: Reason, unfinished: int) -> None:
        self._present_s[worker] += now - self._since[worker]
        self._end_wait(now, worker)
        self._emit(_left(now, worker, reason, unfinished))

    def pushed(self, now: float, decision: Decision, worker: int, compute_s: float, position: int) -> None:
        staleness = decision.staleness
        self._staleness[staleness] = self._staleness.get(staleness, 0) + 1
        self._compute_s[worker] += compute_s
        if decision.release == (worker,):  # by far the usual answer, and nobody waited
            if decision.gap > self._max_gap:
                self._max_gap = decision.gap
        else:
            self._waits_since[worker] = now
            self._released(now, decision)
        if self._clocks.pushes >= self._next:
            self._next += self._every
            self._emit(self._progress(now))

    def asked(self, now: float, decision: Decision) -> None:
        self._released(now, decision)

    def ended(self, now: float, status: Status, detail: str) -> None:
        clocks, tally = self._clocks, self._tally
        compute_s, wait_s = tuple(self._compute_s), tuple(self._wait_s)
        self._emit(self._progress(now))
        samples = clocks.pushes * self._batch
        self._emit(Totals(now, clocks.pushes, samples, self._max_gap, self._staleness, compute_s, wait_s))
        # Totals says neither how many steps were made nor how long each worker was there.
        tally.version = clocks.version
        tally.present_s = dict(enumerate(self._present_s))
        self._emit(RunEnded(now, status, detail))

    def _released(self, now: float, decision: Decision) -> None:
        if decision.gap > self._max_gap:
            self._max_gap = decision.gap
        for worker in decision.release:
            self._end_wait(now, worker)

    def _end_wait(self, now: float, worker: int) -> None:
        since = self._waits_since[worker]
        if since is not None:
            self._wait_s[worker] += now - since
            self._waits_since[worker] = None

    def _progress(self, now: float) -> Progress:
        clocks = self._clocks
        return Progress(
            now,
            clocks.pushes,
            clocks.pushes * self._batch,
            clocks.version,
            clocks.slowest,
            clocks.fastest,
            clocks.waiting_count,
        )


def _left(now: float, worker: int, reason: Reason, unfinished: int) -> WorkerLeft:
    detail = "lost, as the cluster says" if reason == "died" else ""
    return WorkerLeft(now, worker, reason, detail, unfinished)
