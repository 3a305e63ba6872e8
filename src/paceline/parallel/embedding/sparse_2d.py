"""2D sparse parallelism: embedding tables are split inside groups of workers and copied over groups.

Paper: Zhang et al., "Two-dimensional Sparse Parallelism for Large Scale Deep Learning Recommendation Model
Training", arXiv 2508.03854, 2025.

Promise: with SGD, synchronised after every step, tables train as in one process.

When: embedding tables are too large for one worker, and all-to-all over all workers is slow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sparse2D:
    data: str = "allreduce"
    """How what is not a table keeps in step over groups: allreduce, local_sgd or dpsgd, settings after
    colons. Tables have a period of their own."""
