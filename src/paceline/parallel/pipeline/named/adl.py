"""Accumulated decoupled learning: fully decoupled, with one update for several batches.

Paper: Zhuang, Weng, Luo, Toh, Li, Lin, "Accumulated Decoupled Learning with Gradient Staleness Mitigation for
Convolutional Neural Networks", ICML 2021.

Promise: as `fdg`, with the staleness in updates divided by `every`.

When: a pipeline should never wait, and gradients of several batches can make one step.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Order, Schedule


@dataclass(frozen=True, slots=True)
class ADL:
    every: int = 2
    """Batches whose gradients are averaged for one update; before an evaluation what there is counts."""
    order: Order = "backward_first"
    """What comes first in an iteration."""
    predict: bool = False
    """Forward a batch at the weights that momentum is expected to lead to by its backward (SGD only)."""
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        delays = Delays.uniform(stages, 1, 1)
        return Schedule(delays, "graph", "stashed", self.order, every=self.every, predict=self.predict)
