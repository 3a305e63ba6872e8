"""Bounded parameter server: asynchronous within a bound, with a regular restart of all workers together.

Paper: Ovi, "Performance Characterization of Distributed Deep Learning Strategies", 2026,
arXiv 2505.12832, which measures a synchronous, an asynchronous and a staleness-mitigating server.
The paper does not state the rules of the third. This protocol implements the two possible readings.

Promise: no worker is more than `staleness` iterations ahead of the slowest, and after every `resync` steps
per active worker all start together on the same weights.

When: workers drift apart slowly, and you want both a bound and a regular common start.

Invariant: a released worker has completed at most `staleness` iterations more than the slowest active worker
(SSP's rule, taken from there). Once resync x active steps have been made since the last common start, no
worker is released until all wait; then all are released. staleness=null with resync=0 decides as ASP;
staleness=0 with buffered and resync=0 decides as BSP.

Where we differ: the period counts steps per active worker, so it means the same for any number of workers.
When all wait, the slowest have pushed once more, so no worker is beyond the bound and SSP's rule releases
all. With `buffered` the store makes one step each time the slowest clock ticks, with all gradients that have
arrived since its last step.

With `tell_waits` the run's trace ends with a note of how long workers waited for each reason. A wait counts
for the bound as long as SSP's rule holds the worker back, and for the common start after that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from sys import maxsize
from typing import ClassVar

from msgspec.structs import replace

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.paced.ssp import SSP

_APPLY, _HOLD = Fate.APPLY, Fate.HOLD


@cache
def _bound(staleness: int | None) -> SSP:
    return SSP(maxsize if staleness is None else staleness)


@dataclass(slots=True)
class BoundedPS:
    lockstep: ClassVar[bool] = False

    staleness: int | None = 2
    """Iterations a worker may be ahead of the slowest. null: no bound."""
    resync: int = 50
    """Number of steps per active worker after which all workers wait and start together. 0: never."""
    buffered: bool = False
    """Whether the gradients of a round are applied together in one step, instead of one by one on arrival."""
    tell_waits: bool = False
    """Whether a note at the end says how long workers waited for the bound and for the common start."""

    round: int = field(init=False, default=0)
    synced: int = field(init=False, default=0)
    waits: dict[int, str] = field(init=False, default_factory=dict)
    waited_s: dict[str, float] = field(init=False, default_factory=dict)
    looked_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        _bound(self.staleness)
        if self.resync < 0:
            raise ConfigError(f"BoundedPS resync must be >= 0, got {self.resync}. Use 0 to never resync.")

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        verdict = self._decided(clocks, pushed)
        return self._timed(clocks, verdict) if self.tell_waits else verdict

    def _decided(self, clocks: Clocks, pushed: int | None) -> Verdict:
        active = len(clocks.active)
        all_wait = clocks.waiting_count == active
        round_ends = all_wait or clocks.slowest != self.round
        self.round = clocks.slowest
        fate, flush = _HOLD if self.buffered else _APPLY, None
        gradients = clocks.held + (self.buffered and pushed is not None)
        if round_ends and gradients:
            flush = Flush.MEAN if self.staleness == 0 or gradients == active else Flush.PART
        steps = clocks.version + (round_ends if self.buffered else pushed is not None)
        if self.resync > 0 and steps - self.synced >= self.resync * active:
            if not all_wait:
                return Verdict(fate=fate, flush=flush)
            self.synced = steps
        release = _bound(self.staleness).decide(clocks, pushed).release
        return Verdict(fate=fate, flush=flush, release=release)

    def _timed(self, clocks: Clocks, verdict: Verdict) -> Verdict:
        """Add the time since the last event to the totals of the workers that waited, then note why each
        worker waits now."""
        for cause in self.waits.values():
            self.waited_s[cause] = self.waited_s.get(cause, 0.0) + clocks.now - self.looked_s
        asleep = sorted(set(clocks.waiting()).difference(verdict.release))
        free = set(clocks.waiting(up_to=clocks.slowest + _bound(self.staleness).staleness))
        self.waits = {worker: "meeting" if worker in free else "bound" for worker in asleep}
        self.looked_s = clocks.now
        if clocks.active:
            return verdict
        bound, meeting = (self.waited_s.get(cause, 0.0) for cause in ("bound", "meeting"))
        note = f"all workers together waited {bound:.3g} s for the bound and {meeting:.3g} s to meet"
        return replace(verdict, note=note)
