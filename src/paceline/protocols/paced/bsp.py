"""Bulk Synchronous Parallel: in each iteration every worker waits for all others.

Paper: Valiant, "A Bridging Model for Parallel Computation", CACM 1990; on a parameter server as
MXNet's `dist_sync` (Chen et al., arXiv 1512.01274).

Promise: no staleness; one step per round, equal to one process with the whole batch.

When: workers are about equal, or steps must equal those of one process with the whole batch. With
`--balance` also when one worker is always slower.

Invariant: no worker starts an iteration before the gradients of all active workers went into one step. The
test is *all active workers wait*, not *clocks are equal*, so a worker that joins late or has left needs no
special case. The mean is over the workers that contributed to the round, not over the configured number of
workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks

_WAIT = Verdict(fate=Fate.HOLD)


@dataclass(frozen=True, slots=True)
class BSP:
    lockstep: ClassVar[bool] = True

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if clocks.waiting_count < len(clocks.active):
            return _WAIT
        return Verdict(fate=Fate.HOLD, flush=Flush.MEAN, release=clocks.waiting())
