"""Drives one paced protocol: events in, numbered decisions out.

The store of a real run and the simulator both hold a `Pacer`; neither adds rules of its own. It
keeps the clock table, asks the protocol, checks that the verdict is possible, and books it.
"""

from __future__ import annotations

from copy import deepcopy

import msgspec

from paceline.protocols.base import Fate, Flush, Pacing
from paceline.protocols.clocks import Clocks, ClockTable

_APPLY, _HOLD = Fate.APPLY, Fate.HOLD  # an enum's member costs a tenth of a microsecond to look up


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A verdict as it was booked: what the carrier of gradients has to do now."""

    number: int
    pushed: int | None
    fate: Fate | None
    """None when nothing was pushed."""
    flush: Flush | None
    gradients: int
    """How many gradients the flush takes."""
    flushed: dict[int, float]
    """Whose held gradients the flush takes, in rank order, with their weights. A worker that died
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
    """The largest lead over the slowest among the released: how far apart iterations start."""
    ask_again_s: float | None
    bench: tuple[int, ...] = ()
    """Who is set aside: still asleep, not released, until a later decision releases it."""
    rebase: bool = False
    """Whether all active workers' clocks were made equal."""
    adjust: dict[str, float] | None = None
    """Factors on the optimizer's own settings, from the next step on."""
    note: str = ""
    """Something to be written to the trace."""


class Pacer:
    """One protocol on one clock table."""

    def __init__(self, protocol: Pacing) -> None:
        self.protocol = protocol
        self._table = ClockTable()
        self._decisions = 0

    @property
    def clocks(self) -> Clocks:
        """The table, to read."""
        return self._table

    @property
    def in_lockstep(self) -> bool:
        """Whether nobody computes while weights change, as things stand: in this phase, if it has phases."""
        rule: Pacing = getattr(self.protocol, "rule", self.protocol)
        return rule.lockstep

    def join(self, worker: int, now: float) -> Decision:
        """A worker begins to take part. It computes at once, on the current version."""
        self._table.now = now
        self._table.join(worker)
        return self._decide(None)

    def leave(self, worker: int, now: float) -> Decision:
        """A worker finished, died or stepped aside."""
        self._table.now = now
        self._table.leave(worker)
        self._table.left = worker
        decision = self._decide(None)
        self._table.left = None
        return decision

    def timer(self, now: float) -> Decision:
        """The time the protocol asked for has come."""
        self._table.now = now
        return self._decide(None)

    def push(self, worker: int, now: float, samples: int = 1, usable: bool = True) -> Decision:
        """A worker completed an iteration and waits. A gradient that is not usable is dropped."""
        table = self._table
        table.now = now
        return self._decide(worker, table.push(worker, samples), usable)

    def plan(self, samples: int | None) -> None:
        """The run is going to process this many samples in all."""
        self._table.planned = samples

    def resume(self, version: int, samples: int = 0, pushes: int = 0) -> None:
        """Go on counting where a checkpoint was taken."""
        self._table.resume(version, samples, pushes)

    def at_rest(self) -> Pacing:
        """A copy of the protocol as it would stand if everybody left now.

        What a rule remembers of workers under way means nothing to those who begin anew later.
        """
        aside, clocks = deepcopy(self), self._table
        for worker in (*clocks.active, *clocks.benched):
            aside.leave(worker, clocks.now)
        return aside.protocol

    def _decide(self, pushed: int | None, read: int | None = None, usable: bool = True) -> Decision:
        table = self._table
        before = table.version
        verdict = self.protocol.decide(table, pushed)
        fate: Fate | None = verdict.fate if usable else Fate.DROP
        if pushed is None:
            fate = None
        elif fate is _APPLY:
            table.version += 1
        elif fate is _HOLD:
            table.hold(pushed, verdict.weight)
        flushed: dict[int, float] = {}
        gradients = 0
        if verdict.flush is not None:
            gradients = table.held
            flushed = table.flush()
            table.version += bool(flushed)
        bench, rebase = verdict.bench, verdict.rebase
        for worker in bench:
            table.bench(worker)
        if rebase:
            table.rebase()
        release, gap = verdict.release, 0
        if release:
            gap = table.let_go(release)
        self._decisions = number = self._decisions + 1
        return Decision(
            number,
            pushed,
            fate,
            verdict.flush if flushed else None,
            gradients,
            flushed,
            release,
            verdict.weight,
            verdict.lr_scale,
            before if read is None else read,
            0 if read is None else before - read,
            table.version,
            gap,
            verdict.ask_again_s,
            bench,
            rebase,
            verdict.adjust,
            verdict.note,
        )
