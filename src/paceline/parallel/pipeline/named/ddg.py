"""Decoupled parallel back-propagation with delayed gradients: stages keep their graphs until gradients come.

Paper: Huo, Gu, Yang, Huang, "Decoupled Parallel Backpropagation with Convergence Guarantee", ICML 2018.

Promise: a gradient is exactly that of the weights its batch was forwarded at, K-1-k updates ago at stage k.

When: a pipeline should not wait for backward, and memory is enough to keep graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Schedule


@dataclass(frozen=True, slots=True)
class DDG:
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        return Schedule(Delays.uniform(stages, 0, 1), stored="graph", weights="stashed")
