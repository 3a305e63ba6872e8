"""Features Replay: only the backward pass is decoupled, and inputs are replayed through the current weights.

Paper: Huo, Gu, Huang, "Training Neural Networks Using Features Replay", NeurIPS 2018.

Promise: stage k back-propagates at its current weights, exactly K-1-k updates after it forwarded a batch.

When: a pipeline should not wait for backward, and staleness should be as low as replaying allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import Delays
from paceline.parallel.pipeline.engine import Schedule


@dataclass(frozen=True, slots=True)
class FeaturesReplay:
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        return Schedule(Delays.uniform(stages, 0, 1))
