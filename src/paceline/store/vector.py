"""Several flat tensors that are handled as one vector: what a peer protocol sees of a model.

One part per dtype, and for buffers one per buffer. A vector knows which parameters had no gradient
when it was made (`missing`): an optimizer must not decay what took no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class FlatVector:
    """Parts of equal sizes on all workers. Arithmetic makes new memory; `v[:] = w` writes into the old."""

    __slots__ = ("missing", "norm", "parts")

    def __init__(self, parts: Sequence[Tensor], missing: frozenset[int] = frozenset()) -> None:
        self.parts = tuple(parts)
        self.missing = missing
        """Trained parameters that have no part in this gradient."""
        self.norm: float | None = None
        """Its length, if whoever made it has told."""

    @property
    def size_bytes(self) -> int:
        """Bytes it takes to send it."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def clone(self) -> FlatVector:
        """A copy that lasts."""
        return FlatVector([part.clone() for part in self.parts], self.missing)

    def dot(self, other: FlatVector) -> float:
        """The scalar product."""
        return sum((_dot(a, b) for a, b in zip(self.parts, other.parts, strict=True)), 0.0)

    def __setitem__(self, every: slice, other: FlatVector) -> None:
        assert every == slice(None), "a vector is written as a whole"
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.copy_(theirs)

    def __add__(self, other: FlatVector) -> FlatVector:
        return self._with(other, torch.add)

    def __sub__(self, other: FlatVector) -> FlatVector:
        return self._with(other, torch.sub)

    def __mul__(self, factor: float) -> FlatVector:
        return FlatVector([part * factor for part in self.parts], self.missing)

    __rmul__ = __mul__

    def _with(self, other: FlatVector, how: Callable[[Tensor, Tensor], Tensor]) -> FlatVector:
        made = [how(a, b) for a, b in zip(self.parts, other.parts, strict=True)]
        return FlatVector(made, self.missing & other.missing)


def _dot(a: Tensor, b: Tensor) -> float:
    if a.dtype in (torch.bfloat16, torch.float16):
        a, b = a.float(), b.float()
    return float(torch.dot(a, b))
