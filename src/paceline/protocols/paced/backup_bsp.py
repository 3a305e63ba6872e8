"""Synchronous SGD with backup workers: a round takes the first gradients and leaves the last.

Paper: Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016,
arXiv 1604.00981.

Promise: every round is one step with the mean of the first gradients to come, none of them stale;
it never waits for the `backups` slowest.

When: one or two of many workers are late now and then, and losing their late gradients costs less than
waiting for them.

Invariant: a round ends when all but `backups` of the active workers (but at least one) wait, and
no gradient in its step was computed on the weights of an earlier round. Who is still computing
then is late: its gradient is dropped, and it goes on at once with fresh weights, in the round that
has begun meanwhile. backups=0 decides as BSP.

Where we differ: the paper counts N workers and b backups, here `backups` are among the workers
there are, so that the round shrinks when some die. late=apply makes a step of its own of a late
gradient instead of dropping it; the round it falls into does not become stale by that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks

_WAIT = Verdict(fate=Fate.HOLD)


@dataclass(slots=True)
class BackupBSP:
    lockstep: ClassVar[bool] = False

    backups: int = 1
    """Workers a round does not wait for. Larger waits less, and leaves more work unused."""
    late: Literal["drop", "apply"] = "drop"
    """What becomes of a gradient that comes after its round: dropped, or a step of its own."""

    began: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if self.backups < 0:
            raise ConfigError(
                f"BackupBSP backups must be >= 0, got {self.backups}. Use 0 to wait for all, as BSP does."
            )

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if self.began > clocks.version:  # a round without a usable gradient made no step
            self.began = clocks.version
        if pushed is not None and clocks.version - clocks.staleness(pushed) < self.began:
            return Verdict(fate=Fate(self.late), release=(pushed,))
        active = len(clocks.active)
        if clocks.waiting_count < max(active - self.backups, min(active, 1)):
            return _WAIT
        self.began = clocks.version + 1
        return Verdict(fate=Fate.HOLD, flush=Flush.MEAN, release=clocks.waiting())
