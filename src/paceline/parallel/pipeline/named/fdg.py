"""Fully decoupled learning with delayed gradients: forward, backward and update of all stages at once.

Paper: Zhuang, Wang, Liu, Lin, "Fully Decoupled Neural Network Learning Using Delayed Gradients", TNNLS
2022 (arXiv 1906.09108). With copies along the axis `data` it is the grid of Pham and Ahn, arXiv 2509.05679,
whose way to mix the copies could not be verified: here it is all-reduce, or gossip if `data` says so.

Promise: a gradient is exactly that of the weights its batch was forwarded at, up to 2(K-1-k)-1 updates ago.

When: stages are about equally slow, and forward, backward and update should all overlap.

Every iteration does its backward first, as the published code does, so that 2(K-1-k)-1 updates lie between
forward and backward at stage k, none at the last.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Order, Schedule, Stored, Weights


@dataclass(frozen=True, slots=True)
class FDG:
    shrink: float = 1.0
    """Factor on the gradient at every boundary it crosses (beta); 0.2 to 0.8 helped the authors, 1: off."""
    weights: Weights = "stashed"
    """At which weights a batch is back-propagated: stashed, as the paper says, or current (one copy only)."""
    order: Order = "backward_first"
    """What comes first in an iteration."""
    predict: bool = False
    """Forward a batch at the weights that momentum is expected to lead to by its backward (SGD only)."""
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        stored: Stored = "graph" if self.weights == "stashed" else "inputs"
        delays = Delays.uniform(stages, 1, 1)
        return Schedule(delays, stored, self.weights, self.order, self.shrink, predict=self.predict)
