"""Where a worker's piece of a split tensor lies in the whole.

A module that holds pieces says so by a method `pieces()`: its own names of parameters and buffers, and the
piece that each of them is. So checkpoints are whole, and can be read by another number of workers.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import torch
from torch import Tensor, nn


class TensorPiece(msgspec.Struct, frozen=True):
    """Ranges of one dimension, one after another."""

    shape: tuple[int, ...]
    """Of the whole."""
    dim: int
    spans: tuple[tuple[int, int], ...]
    """Beginnings and ends, in the order in which they lie in the piece."""
    axis: str = "model"
    """Of the mesh, along which the other pieces lie."""

    @property
    def size(self) -> int:
        """How long the piece is in its dimension."""
        return sum(end - start for start, end in self.spans)

    def of(self, whole: Tensor) -> Tensor:
        """The piece, as a tensor of its own."""
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.spans]
        return torch.cat(parts, self.dim) if len(parts) > 1 else parts[0].clone()

    def into(self, whole: Tensor, own: Tensor) -> None:
        """Put the piece where it belongs."""
        sizes = [end - start for start, end in self.spans]
        for (start, end), part in zip(self.spans, torch.split(own, sizes, self.dim), strict=True):
            whole.narrow(self.dim, start, end - start).copy_(part)

    def like(self, own: Tensor, state: Tensor) -> TensorPiece | None:
        """Where what an optimizer remembers of this piece lies; None: it is not cut."""
        if state.ndim <= self.dim or state.shape[self.dim] != own.shape[self.dim] or not state.ndim:
            return None
        shape = list(state.shape)
        shape[self.dim] = self.shape[self.dim]
        return TensorPiece(tuple(shape), self.dim, self.spans, self.axis)


@runtime_checkable
class Pieced(Protocol):
    """A module that holds pieces."""

    def pieces(self) -> dict[str, TensorPiece]:
        """By its own names of parameters and buffers."""


def pieces_of(model: nn.Module) -> dict[str, TensorPiece]:
    """All pieces in a model, by the names of its `state_dict`."""
    found: dict[str, TensorPiece] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Pieced):
            dot = f"{prefix}." if prefix else ""
            found |= {f"{dot}{name}": piece for name, piece in module.pieces().items()}
    return found


def in_order(sequential: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of an nn.Sequential as they compute. One that stands there twice is called twice, but
    `named_children` tells of its first place only."""
    return [(name, module) for name, module in sequential._modules.items() if module is not None]
