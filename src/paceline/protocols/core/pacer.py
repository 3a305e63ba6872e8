"""Drives one paced protocol: events in, numbered decisions out.

The store of a real run and the simulator both hold a `Pacer` and add no rules of their own. It keeps the
clock table, asks the protocol, checks that the verdict is possible, and records it.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from math import inf
from typing import Protocol

import msgspec
from msgspec.structs import replace

from paceline.protocols.core.base import Fate, Flush, Pacing, Verdict
from paceline.protocols.core.clocks import Clocks, ClockTable

_APPLY, _HOLD = Fate.APPLY, Fate.HOLD  # an enum's member costs a tenth of a microsecond to look up
_NOBODY: dict[int, float] = {}


class ParkingRule(Protocol):
    """Decides which workers to set aside during a run and which to call back (see
    `rules/slow_parking.py`)."""

    def joined(self, worker: int) -> None: ...
    def left(self, clocks: Clocks, worker: int, away: bool) -> None: ...
    def pushed(self, clocks: Clocks, worker: int) -> None: ...
    def parks(self, clocks: Clocks, worker: int) -> bool: ...
    def called_back(self, clocks: Clocks) -> tuple[int, ...]: ...
    def told(self, parked: int | None, back: Iterable[int]) -> str: ...


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A recorded verdict: what the store must do now."""

    number: int
    pushed: int | None
    fate: Fate | None
    """None when nothing was pushed."""
    flush: Flush | None
    gradients: int
    """How many gradients the flush takes."""
    flushed: dict[int, float]
    """The workers whose held gradients the flush uses, in rank order, with their weights. A worker that died
    with one held, came back and pushed again has two, kept as their sum with their summed weight."""
    release: tuple[int, ...]
    weight: float
    """The pushed gradient's share, if it is held."""
    lr_scale: float
    read: int
    """The version the pushed gradient was computed on."""
    staleness: int
    """Optimizer steps between the pushed gradient's read and this verdict."""
    version: int
    """The version after the verdict; what a released worker reads."""
    gap: int
    """The largest lead over the slowest among the released workers."""
    ask_again_s: float | None
    bench: tuple[int, ...] = ()
    """Workers that are set aside: they sleep until a later decision releases them."""
    rebase: bool = False
    """Whether all active workers' clocks were made equal."""
    adjust: dict[str, float] | None = None
    """Factors on the optimizer's own settings, from the next step on."""
    note: str = ""
    """A note to write to the trace."""


class Pacer:
    """One protocol on one clock table."""

    def __init__(
        self, protocol: Pacing, drop_staler: int | None = None, parking: ParkingRule | None = None
    ) -> None:
        """`drop_staler`: drop gradients that missed more updates than this, whatever the protocol says; the
        protocol still decides which workers are released. A gradient is dropped only after another was
        applied, so training makes progress with any limit. `parking`: sets workers aside, whatever the
        protocol says."""
        self.protocol = protocol
        self._stalest = inf if drop_staler is None else drop_staler
        self._table = ClockTable()
        self.clocks: Clocks = self._table
        """The table, to read."""
        self.parking = parking
        self._decisions = 0

    @property
    def in_lockstep(self) -> bool:
        """Whether no worker computes while weights change now (in the current phase, if there are phases)."""
        rule: Pacing = getattr(self.protocol, "rule", self.protocol)
        return rule.lockstep

    def join(self, worker: int, now: float) -> Decision:
        """A worker begins to take part. It computes at once, on the current version."""
        self._table.now = now
        self._table.join(worker)
        if self.parking is not None:
            self.parking.joined(worker)
        return self._asked()

    def leave(self, worker: int, now: float, away: bool = False) -> Decision:
        """A worker finished, died or stepped aside (`away`: to be back)."""
        self._table.now = now
        self._table.leave(worker)
        if self.parking is not None:
            self.parking.left(self._table, worker, away)
        self._table.left = worker
        decision = self._asked()
        self._table.left = None
        return decision

    def timer(self, now: float) -> Decision:
        """The time the protocol asked for has come."""
        self._table.now = now
        return self._asked()

    def push(self, worker: int, now: float, samples: int = 1, usable: bool = True) -> Decision:
        """A worker completed an iteration and waits. A gradient not usable, or too stale, is dropped."""
        table = self._table
        table.now, before = now, table.version
        read = table.push(worker, samples)
        verdict = self.protocol.decide(table, worker)
        fate = verdict.fate if usable and before - read <= self._stalest else Fate.DROP
        if fate is _APPLY:
            table.version = before + 1
        elif fate is _HOLD:
            table.hold(worker, verdict.weight)
        aside: tuple[int, ...] = ()
        if self.parking is not None:
            verdict, aside = self._parked(self.parking, verdict, worker)
        return self._booked(verdict, worker, fate, read, before - read, aside)

    def passed(self, worker: int, now: float) -> Decision:
        """A worker with its own barrier continues; the protocol does not decide this."""
        self._table.now = now
        return self._booked(Verdict(release=(worker,)), None, None, self._table.version, 0)

    def plan(self, samples: int | None) -> None:
        """The run will process this many samples in all."""
        self._table.planned = samples

    def resume(self, version: int, samples: int = 0, pushes: int = 0) -> None:
        """Continue counting from a checkpoint."""
        self._table.resume(version, samples, pushes)

    def at_rest(self) -> Pacing:
        """A copy of the protocol in the state it would have if all workers left now.

        What a rule remembers about running workers is useless after a restart.
        """
        aside, clocks = deepcopy(self), self._table
        for worker in (*clocks.active, *clocks.benched):
            aside.leave(worker, clocks.now)
        return aside.protocol

    def _asked(self) -> Decision:
        """Decide about an event without a push."""
        verdict = self.protocol.decide(self._table, None)
        if self.parking is not None:
            verdict = _with_called_back(self.parking, self._table, verdict)
        return self._booked(verdict, None, None, self._table.version, 0)

    def gone(self, worker: int, now: float) -> Decision | None:
        """A worker that was away will not be back. Only parked workers can be waiting for that."""
        if self.parking is None:
            return None
        self.parking.left(self._table, worker, away=False)
        return self.timer(now)

    def _parked(self, parking: ParkingRule, verdict: Verdict, worker: int) -> tuple[Verdict, tuple[int, ...]]:
        """Set the worker aside if necessary; its protocol continues as if the worker had left. Returns the
        workers set aside."""
        table = self._table
        parking.pushed(table, worker)
        if not parking.parks(table, worker):
            return _with_called_back(parking, table, verdict), ()
        table.bench(worker)
        table.left = worker
        further = self.protocol.decide(table, None)
        table.left = None
        release = dict.fromkeys((*verdict.release, *further.release))
        release.pop(worker, None)
        parted = replace(verdict, release=tuple(release), note=parking.told(worker, ()))
        return _with_called_back(parking, table, parted), (worker,)

    def _booked(
        self,
        verdict: Verdict,
        pushed: int | None,
        fate: Fate | None,
        read: int,
        staleness: int,
        aside: tuple[int, ...] = (),
    ) -> Decision:
        """`aside`: who was set aside already."""
        table, flush, gradients, flushed = self._table, verdict.flush, 0, _NOBODY
        if flush is not None:
            gradients, flushed = table.held, table.flush()
            flush = flush if flushed else None
            table.version += bool(flushed)
        for worker in verdict.bench:
            table.bench(worker)
        if verdict.rebase:
            table.rebase()
        release = verdict.release
        gap = table.let_go(release) if release else 0
        self._decisions = number = self._decisions + 1
        return Decision(
            number,
            pushed,
            fate,
            flush,
            gradients,
            flushed,
            release,
            verdict.weight,
            verdict.lr_scale,
            read,
            staleness,
            table.version,
            gap,
            verdict.ask_again_s,
            verdict.bench or aside,
            verdict.rebase,
            verdict.adjust,
            verdict.note,
        )


def _with_called_back(parking: ParkingRule, clocks: Clocks, verdict: Verdict) -> Verdict:
    back = parking.called_back(clocks)
    if not back:
        return verdict
    note = "; ".join(filter(None, (verdict.note, parking.told(None, back))))
    return replace(verdict, release=(*verdict.release, *back), note=note)
