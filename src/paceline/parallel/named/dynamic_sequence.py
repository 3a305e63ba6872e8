"""Dynamic sequence parallelism: workers hold parts of the same samples, and which dimension is cut changes.

Paper: Zhao, Cheng, Chen, Zheng, Liu, Yang, You, "DSP: Dynamic Sequence Parallelism for Multi-Dimensional
Transformers", ICML 2025.

Promise: no staleness; weights as one process has them, to rounding. A switch sends less than 1/N of a tensor.

When: samples have two long dimensions, such as time and space, and do not fit on one worker.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DynamicSequence:
    data: str = "allreduce"
    """How copies along `data` keep in step: allreduce, local_sgd or dpsgd, settings after colons."""
