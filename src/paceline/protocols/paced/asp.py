"""Asynchronous Parallel: no worker waits for another.

Paper: Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012; on a parameter server
as MXNet's `dist_async` (Chen et al., arXiv 1512.01274).

Promise: no waiting at all; staleness has no bound.

When: workers are unequal or slow links make waiting expensive, and the model tolerates stale gradients (with
momentum the default correction helps).

Invariant: every push is applied and its worker released at once, so no worker ever waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.protocols.core.base import Verdict
from paceline.protocols.core.clocks import Clocks


@dataclass(frozen=True, slots=True)
class ASP:
    lockstep: ClassVar[bool] = False

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=() if pushed is None else (pushed,))
