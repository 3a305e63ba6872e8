"""Who owns which outputs of a layer: blocks in the order of ranks, their lengths as equal as can be.

Where the workers do not divide the outputs, the longer blocks go to those who have the least so far, so that
over many layers all own about equally much.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from paceline.parallel.pieces import TensorPiece


@dataclass(frozen=True)
class Blocks:
    """The lengths of all workers' blocks, and whose this one is."""

    sizes: tuple[int, ...]
    index: int

    @property
    def span(self) -> tuple[int, int]:
        """Where this worker's block begins and ends."""
        ends = list(accumulate(self.sizes))
        return ends[self.index] - self.sizes[self.index], ends[self.index]

    @property
    def own(self) -> int:
        """How long it is."""
        return self.sizes[self.index]

    def piece(self, shape: tuple[int, ...], dim: int = 0, repeats: int = 1) -> TensorPiece:
        """This block of a tensor with such a shape; `repeats`: of gates that lie one below the other."""
        start, end = self.span
        each = shape[dim] // repeats
        return TensorPiece(shape, dim, tuple((start + k * each, end + k * each) for k in range(repeats)))


class Shares:
    """Deals the outputs of layer after layer out."""

    def __init__(self, workers: int, index: int) -> None:
        self._index = index
        self._owned = [0] * workers

    def deal(self, count: int, numbers_each: int) -> Blocks:
        """The blocks of a layer with so many outputs, each with so many weights."""
        workers = len(self._owned)
        size, more = divmod(count, workers)
        least = sorted(range(workers), key=lambda k: (self._owned[k], k))[:more]
        sizes = tuple(size + (k in least) for k in range(workers))
        for k, length in enumerate(sizes):
            self._owned[k] += length * numbers_each
        return Blocks(sizes, self._index)
