"""Row split: every worker owns a block of the output neurons of each layer; activations are gathered.

Paper: Shrivastava, Chaudhury, Jayadeva, "A Data and Model-Parallel, Distributed and Scalable Framework for
Training of Deep Networks in Apache Spark", 2017 (arXiv 1708.05840).

Promise: loss, gradients and weights are those of one process, up to the order of sums, for any number of
workers.

When: layers are too wide for one worker, and the numbers must be those of one process.

Invariant: no weight ever moves; forward gathers activations, backward reduces their gradients to who owns
them. The paper's own exchanges are not published: this is the exact form, with collectives between the
workers instead of stages of Spark. With an axis `data` the grid repeats the model: mode `grad` averages
gradients after every batch, `avg` weights after every `every` batches, both weighted by samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import ConfigError

SMALLEST = 16


@dataclass(frozen=True, slots=True)
class RowSplit:
    mode: Literal["grad", "avg"] = "grad"
    """What copies along the axis data average: gradients of every batch, or weights after `every` batches."""
    every: int = 0
    """In mode avg: batches between two averagings; 0: one pass of the data."""
    pair: bool = False
    """Split every second layer of a chain by its inputs: half the synchronisations, the same numbers."""
    smallest: int = SMALLEST
    """Layers with fewer outputs, or fewer than there are workers, are not split: all workers have them."""

    def __post_init__(self) -> None:
        if self.mode not in ("grad", "avg"):
            raise ConfigError(f"row_split mode is 'grad' or 'avg', got {self.mode!r}.")
        if self.every < 0 or self.smallest < 1:
            raise ConfigError(
                f"row_split needs every >= 0 and smallest >= 1, got {self.every} and {self.smallest}."
            )

    @property
    def data(self) -> str:
        """What keeps copies in step."""
        return "allreduce" if self.mode == "grad" else f"local_sgd:period={self.every or 1}:by_samples=true"

    def for_pass(self, batches: int) -> RowSplit:
        """The same, for passes of so many batches."""
        return replace(self, every=self.every or max(1, batches))
