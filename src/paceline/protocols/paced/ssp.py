"""Stale Synchronous Parallel: fast workers run ahead, but only so far.

Paper: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NeurIPS 2013. Here one clock tick is one optimizer step, and a released worker always
reads fresh weights (no client cache), as in the deep-learning form of SSP. The paper's increments, which
workers compute and the server only adds, are a setting of a run: `--apply increments`.

Promise: no worker is more than `staleness` iterations ahead of the slowest.

When: slowness comes and goes and staleness must stay within a known bound.

Invariant: a released worker has completed at most `staleness` iterations more than the slowest
active worker. Hence staleness=0 waits exactly as BSP does, and some worker can always run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import ConfigError
from paceline.protocols.core.base import Verdict
from paceline.protocols.core.clocks import Clocks


@dataclass(frozen=True, slots=True)
class SSP:
    lockstep: ClassVar[bool] = False

    staleness: int = 3
    """Iterations a worker may be ahead of the slowest. A larger value waits less and reads older weights."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(
                f"SSP staleness must be >= 0, got {self.staleness}. "
                "Use 0 to wait as BSP does, or protocol 'asp' for no bound at all."
            )

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        # Not only the worker that just arrived: when the slowest one advances,
        # everybody it was holding back is freed by the same event.
        return Verdict(release=clocks.waiting(up_to=clocks.slowest + self.staleness))
