"""Bulk Synchronous Parallel: everybody waits for everybody, each iteration.

Paper: Valiant, "A Bridging Model for Parallel Computation", CACM 1990; on a parameter server as
MXNet's `dist_sync` (Chen et al., arXiv 1512.01274).

Promise: no staleness; one step per round, equal to one process with the whole batch.

When: workers are about equal, or steps must equal those of one process with the whole batch. With
`--balance` also when one worker is always slower.

Invariant: nobody starts an iteration before the gradients of all active workers went into one
step. *All active wait* is the test, not *clocks are equal*: a worker that joins late, or has
left, then needs no special case. The mean is over the round's contributors, not over the number
of workers once configured.
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
