"""What a simulated run writes: every decision, or only what they add up to.

Both ways give the same result. Writing a million decisions costs more time than deciding them, so
large runs are summed up: about 200 `Progress` events and one `Totals`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np
from msgspec import structs

from paceline.protocols import Clocks, Decision, Fate
from paceline.protocols.core.asleep import Asleep
from paceline.trace.events import (
    AnyEvent,
    Decided,
    Note,
    Passed,
    Progress,
    RunEnded,
    Totals,
    WorkerJoined,
    WorkerLeft,
)

Emit = Callable[[AnyEvent], None]
Reason = Literal["finished", "died"]
Status = Literal["finished", "failed"]

PROGRESS_EVENTS = 200
_DROP = Fate.DROP


class SimulationRecord(Protocol):
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

    def passed(self, now: float, decision: Decision, worker: int, looks: int, asked: int) -> None:
        """A worker passed the barrier it keeps itself."""
        ...

    def ended(self, now: float, status: Status, detail: str) -> None:
        """The run is over."""
        ...


class Full:
    """Writes every decision."""

    def __init__(
        self,
        emit: Emit,
        clocks: Clocks,
        samples: list[int],
        unit: int,
        exchange_s: list[float],
        asleep: Asleep | None = None,
    ) -> None:
        """`samples`: behind each worker's push, as they are by then; a position counts `unit` of them.
        `asleep`: of peers."""
        self._emit = emit
        self._clocks = clocks
        self._samples = samples
        self._unit = unit
        self._exchange_s = exchange_s
        self._asleep = asleep or Asleep()

    def joined(self, now: float, worker: int) -> None:
        self._emit(WorkerJoined(now, worker))

    def left(self, now: float, worker: int, reason: Reason, unfinished: int) -> None:
        self._emit(_left(now, worker, reason, unfinished, *self._asleep.take(worker)))

    def pushed(self, now: float, decision: Decision, worker: int, compute_s: float, position: int) -> None:
        more_wait_s, travel_s = self._asleep.take(worker)
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
                samples=self._samples[worker],
                read=decision.read,
                staleness=decision.staleness,
                gap=decision.gap,
                lr_scale=decision.lr_scale,
                compute_s=compute_s,
                exchange_s=self._exchange_s[worker],
                work=((0, position * self._unit, self._samples[worker]),),
                more_wait_s=more_wait_s,
                travel_s=travel_s,
            )
        )
        _tell(self._emit, now, decision)

    def asked(self, now: float, decision: Decision) -> None:
        if not decision.flushed and not decision.release:
            _tell(self._emit, now, decision)
            return
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
        _tell(self._emit, now, decision)

    def passed(self, now: float, decision: Decision, worker: int, looks: int, asked: int) -> None:
        self._emit(Passed(now, worker, looks, asked))
        self.asked(now, decision)

    def ended(self, now: float, status: Status, detail: str) -> None:
        self._emit(RunEnded(now, status, detail))


class Summary:
    """Adds decisions up and writes where the run stands from time to time."""

    def __init__(
        self, emit: Emit, clocks: Clocks, workers: int, total: int, asleep: Asleep | None = None
    ) -> None:
        self._emit = emit
        self._asleep = asleep
        self._travel_s = [0.0] * workers if asleep else []
        self._clocks = clocks
        self._every = max(1, total // PROGRESS_EVENTS)
        self._max_gap = -1
        self._staleness: Counter[int] = Counter()
        self._compute_s = np.zeros(workers)
        self._pushes = np.zeros(workers, dtype=np.int64)
        self._wait_s = [0.0] * workers
        self._waits_since: list[float | None] = [None] * workers
        # Of the pushes since the last event: added up many at once, which is far cheaper.
        self._pushed: list[int] = []
        self._took_s: list[float] = []
        self._stale: list[int] = []
        self._looks: tuple[int, int] | None = None

    def joined(self, now: float, worker: int) -> None:
        self._emit(WorkerJoined(now, worker))

    def left(self, now: float, worker: int, reason: Reason, unfinished: int) -> None:
        self._end_wait(now, worker)
        self._slept(worker)
        self._emit(_left(now, worker, reason, unfinished))

    def pushed(self, now: float, decision: Decision, worker: int, compute_s: float, position: int) -> None:
        if self._asleep is not None:
            self._slept(worker)
        self._pushed.append(worker)
        self._took_s.append(compute_s)
        if decision.fate is not _DROP:
            self._stale.append(decision.staleness)
        release = decision.release
        if decision.gap > self._max_gap and release:
            self._max_gap = decision.gap
        if release != (worker,):  # the usual answer is that it does not wait
            self._waits_since[worker] = now
            if release:
                self._released(now, release)
        if decision.note:
            _tell(self._emit, now, decision)
        if len(self._pushed) == self._every:
            self._add_up()
            self._emit(self._progress(now))

    def asked(self, now: float, decision: Decision) -> None:
        if decision.release:
            self._max_gap = max(self._max_gap, decision.gap)
            self._released(now, decision.release)
        _tell(self._emit, now, decision)

    def passed(self, now: float, decision: Decision, worker: int, looks: int, asked: int) -> None:
        before = self._looks or (0, 0)
        self._looks = before[0] + looks, before[1] + asked
        self.asked(now, decision)

    def ended(self, now: float, status: Status, detail: str) -> None:
        self._add_up()
        for worker in range(len(self._wait_s)):
            self._end_wait(now, worker)
        clocks = self._clocks
        compute_s, wait_s = tuple(self._compute_s.tolist()), tuple(self._wait_s)
        self._emit(self._progress(now))
        samples, max_gap = clocks.total_samples, None if self._max_gap < 0 else self._max_gap
        each, looks = tuple(self._pushes.tolist()), self._looks or (None, None)
        totals = clocks.pushes, samples, max_gap, self._staleness, compute_s, wait_s, each, *looks
        self._emit(structs.replace(Totals(now, *totals), travel_s=tuple(self._travel_s)))
        self._emit(RunEnded(now, status, detail))

    def _slept(self, worker: int) -> None:
        if self._asleep is not None:
            more_wait_s, travel_s = self._asleep.take(worker)
            self._wait_s[worker] += more_wait_s
            self._travel_s[worker] += travel_s

    def _add_up(self) -> None:
        self._staleness.update(self._stale)
        if self._pushed:
            self._compute_s += np.bincount(self._pushed, self._took_s, len(self._compute_s))
            self._pushes += np.bincount(self._pushed, minlength=len(self._pushes))
        self._pushed.clear()
        self._took_s.clear()
        self._stale.clear()

    def _released(self, now: float, workers: tuple[int, ...]) -> None:
        waits_since, wait_s = self._waits_since, self._wait_s
        for worker in workers:
            since = waits_since[worker]
            if since is not None:
                wait_s[worker] += now - since
                waits_since[worker] = None

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
            clocks.total_samples,
            clocks.version,
            clocks.slowest,
            clocks.fastest,
            clocks.waiting_count,
        )


def _tell(emit: Emit, now: float, decision: Decision) -> None:
    if decision.note:
        emit(Note(now, "info", decision.note))


def _left(
    now: float,
    worker: int,
    reason: Reason,
    unfinished: int,
    more_wait_s: float = 0.0,
    travel_s: float = 0.0,
) -> WorkerLeft:
    detail = "lost, as the cluster says" if reason == "died" else ""
    return WorkerLeft(now, worker, reason, detail, unfinished, more_wait_s=more_wait_s, travel_s=travel_s)
