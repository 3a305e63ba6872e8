"""Layer-wise staleness: every stage has its own delays, keeps inputs only and one copy of its weights.

Paper: Xu, Huo, Huang, "On the Acceleration of Deep Learning Model Parallelism with Staleness", CVPR 2020
(there called DSP, diversely stale parameters).

Promise: stage k back-propagates at its current weights, exactly m_k updates after it forwarded a batch;
stragglers change nothing but the time.

When: you choose how stale each stage may be, and memory is scarce.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.pipeline.delays import parse_delays
from paceline.parallel.pipeline.engine import Schedule


@dataclass(frozen=True, slots=True)
class Layerwise:
    p: str = ""
    """Delays of activations, one for each stage, the last 0: 1,1,0. Empty: 1 at every boundary."""
    m: str = ""
    """Staleness of the stages, the last 0: 4,2,0. Empty: 2 for every stage behind."""
    predict: bool = False
    """Forward a batch at the weights that momentum is expected to lead to by its backward (SGD only)."""
    data: str = "allreduce"
    """How the copies of a stage keep in step: allreduce, local_sgd or dpsgd, settings after colons."""

    def schedule(self, stages: int) -> Schedule:
        return Schedule(parse_delays(self.p, self.m, stages), predict=self.predict)
