"""SelSync: synchronise when the gradients change much, train alone when they do not.

Paper: Tyagi and Swany, "Accelerating Distributed ML Training via Selective Synchronization", IEEE
CLUSTER 2023.

Promise: all workers take the same branch at every step; after a parameter synchronisation all are equal.

Invariant: a step synchronises exactly if at least one worker's relative gradient change is `delta` or
more, or its window is not full yet: one bit per worker is exchanged first. delta=0 is BSP for SGD.

Where this differs from the published code: the replica steps first and is averaged then (there the
replicas differ again after every synchronisation); the squared norm of the whole gradient is smoothed,
once; a norm that is not finite asks for a synchronisation and is not remembered. How data are dealt is no
part of the protocol: the paper's partitionings are `--shards own` and `rotating`, its injection `--inject`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Agree, Average, Compute, How, Step, Steps, Vector
from paceline.protocols.core.peer import Me, Peer, average_model

TINY = 1e-12


@dataclass(frozen=True, slots=True)
class SelSync(Peer):
    delta: float = 0.3
    """Relative change of the smoothed gradient norm from which on a step is synchronised; 0: every step."""
    window: int = 25
    """Gradient norms that are smoothed over. Until there are so many, every step is synchronised."""
    smoothing: float = 0.01
    """How much less each older norm in the window counts; 0 gives their plain mean."""
    aggregation: Literal["parameters", "gradients"] = "parameters"
    """What is averaged. Averaged gradients never repair replicas that have drifted apart."""

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
        me.private.smoothed = None

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        urgent = self.changed(me, gradient) >= self.delta
        if self.aggregation == "parameters":
            yield Step(gradient)
            if (yield Agree(urgent, How.ANY)):
                yield from average_model(me)
        elif (yield Agree(urgent, How.ANY)):
            mean = yield Average(gradient, weight=me.samples)
            yield Step(mean)
        else:
            yield Step(gradient)

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
