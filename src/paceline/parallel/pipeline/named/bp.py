"""Back-propagation over stages: a batch goes all the way forward and back before the next one.

Paper: Rumelhart, Hinton, Williams, "Learning representations by back-propagating errors", Nature 1986.

Promise: no staleness; bit for bit what one process computes. One stage computes at a time.

When: a model must be cut into stages and the numbers must be those of plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Schedule


@dataclass(frozen=True, slots=True)
class BP:
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        return Schedule(Delays.uniform(stages, 0, 0), stored="graph", weights="stashed")
