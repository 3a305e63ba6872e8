"""Synchronous SGD with backup workers: a round uses the first gradients that arrive and drops the rest.

Paper: Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016,
arXiv 1604.00981.

Promise: every round is one step with the mean of the first gradients to come, none of them stale;
it never waits for the `backups` slowest.

When: one or two of many workers are late now and then, and losing their late gradients costs less than
waiting for them.

Invariant: a round ends when all but `backups` of the active workers (but at least one) wait, and no gradient
in its step was computed on the weights of an earlier round. A worker that is still computing then is late:
its gradient is dropped, and it continues at once with fresh weights in the next round. backups=0 decides as
BSP.

Where we differ: the paper counts N workers and b backups. Here `backups` are some of the present workers, so
the round shrinks when workers die. With late=apply a late gradient makes a step of its own instead of being
dropped; this does not make the current round stale.
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
    """Number of workers a round does not wait for. A larger value waits less and wastes more work."""
    late: Literal["drop", "apply"] = "drop"
    """What happens to a gradient that arrives after its round: drop it, or apply it as a step of its own."""

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
