"""SelSync: synchronise when the gradients change much, train alone when they do not.

Paper: Tyagi and Swany, "Accelerating Distributed ML Training via Selective Synchronization", IEEE
CLUSTER 2023.

Promise: all workers take the same branch at every step; after a parameter synchronisation all replicas are
equal.

When: gradients change little most of the time, so many averages can be skipped.

Invariant: a step synchronises exactly if at least one worker's relative gradient change is `delta` or
more, or its window is not full yet: one bit per worker is exchanged first. delta=0 is BSP for SGD.

Where this differs from the published code: the replica steps first and is averaged then (there the replicas
differ again after every synchronisation); the squared norm of the whole gradient is smoothed, once, unless
`smooth_delta` asks for the published code's second smoothing; a norm that is not finite asks for a
synchronisation and is not remembered. Data distribution is not part of the protocol: use `--shards own` and
`rotating` for the paper's partitionings, and `--inject` for its injection.

The share of local steps so far (the paper's LSSR; 0 is BSP, 1 never sends a model) is reported with the next
iteration. The last report is the result's `lssr`; it covers all but the last iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Agree, Average, Compute, How, Step, Steps, Vector
from paceline.protocols.core.peer import Me, Peer, average_model, average_optimizer

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class SelSync(Peer):
    delta: float = 0.3
    """A step is synchronised if the smoothed gradient norm changes by at least this share. 0: every step."""
    window: int = 25
    """Number of gradient norms to smooth over. Until it is reached every step is synchronised."""
    smoothing: float = 0.01
    """How much less each older norm in the window counts; 0 gives their plain mean."""
    aggregation: Literal["parameters", "gradients"] = "parameters"
    """What is averaged. Averaged gradients never repair replicas that have drifted apart."""
    smooth_delta: bool = False
    """Smooth the change over the window too, as the published code does. It is much smaller then: choose a
    smaller delta. Every step is synchronised until there are so many changes as well."""
    sync_optimizer_state: bool = False
    """Average momentum and the like at every synchronisation too, which sends as much again for each vector
    that the optimizer remembers. Else every worker keeps its own."""

    def __post_init__(self) -> None:
        if not self.delta >= 0:
            raise ConfigError(
                f"SelSync delta must be >= 0, got {self.delta:g}. Use 0 to synchronise every step."
            )
        if self.window < 1 or not 0 <= self.smoothing < 1:
            raise ConfigError(
                f"SelSync needs window >= 1 and smoothing in [0, 1), got {self.window} "
                f"and {self.smoothing:g}."
            )

    def start(self, me: Me) -> None:
        me.private.norms = []
        me.private.changes = []
        me.private.smoothed = None
        me.agreed.local = me.agreed.synchronised = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        urgent = self.change(me, gradient) >= self.delta
        parameters = self.aggregation == "parameters"
        if parameters:
            yield Step(gradient)
        together = yield Agree(urgent, How.ANY)
        if together and parameters:
            yield from average_model(me)
        elif together:
            gradient = yield Average(gradient, weight=me.samples)
        if not parameters:
            yield Step(gradient)
        if together and self.sync_optimizer_state:
            yield from average_optimizer(me)
        self.count(me, together)

    def count(self, me: Me, together: bool) -> None:
        """Keep the share of local steps, the paper's LSSR."""
        agreed = me.agreed
        agreed.synchronised += bool(together)
        agreed.local += not together
        me.told["lssr"] = agreed.local / (agreed.local + agreed.synchronised)

    def change(self, me: Me, gradient: Vector) -> float:
        """What is compared with delta; infinite while it is unknown."""
        changed, memory = self.changed(me, gradient), me.private
        if not self.smooth_delta or not isfinite(changed):
            return changed
        memory.changes = [*memory.changes, changed][-self.window :]
        return self.smooth(memory.changes) if len(memory.changes) == self.window else float("inf")

    def changed(self, me: Me, gradient: Vector) -> float:
        """How much the smoothed norm has changed, relative to what it was; infinite while unknown."""
        norm, memory = gradient.dot(gradient), me.private
        if not isfinite(norm):
            return float("inf")
        memory.norms = [*memory.norms, norm][-self.window :]
        if len(memory.norms) < self.window:
            return float("inf")
        before, memory.smoothed = memory.smoothed, self.smooth(memory.norms)
        if before is None:
            return float("inf")
        return float(abs(memory.smoothed - before) / (before + TINY * (before == 0)))

    def smooth(self, norms: list[float]) -> float:
        """The mean of the window, the newest counting most."""
        weights = [(1 - self.smoothing) ** age for age in range(len(norms), 0, -1)]
        return sum(w * norm for w, norm in zip(weights, norms, strict=True)) / sum(weights)
