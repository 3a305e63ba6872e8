"""The codecs: a flat vector in, what arrives of it, its bytes on the wire, and what was left out.

Nothing is packed into bytes here: workers of one host read each other's memory, where packing gains nothing.
What counts is that the numbers are those of a packed exchange. NaN and infinity come out as no finite
number, never as a number, so that whoever checks for them still finds them.

`powersgd` here sends one side of the factorisation per exchange, by turns, projected on the other side as
the last mean had it (as ACP-SGD does: Zhang et al., ICDCS 2023). So the basis is the same for all, compressed
vectors can be added up on their way, and one exchange stays one, with half the bytes of the two in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.protocols.compression import FLOAT_BYTES, INT8_CHUNK, Compression
from paceline.store.layout import Layout, Slot

NARROW = (torch.float16, torch.bfloat16)
LEVELS = 127
"""Steps from zero to the largest number of a chunk, on either side."""


class Encoded(NamedTuple):
    """What becomes of a vector."""

    size_bytes: int
    decoded: Tensor
    """What arrives, in the vector's own type."""
    residual: Tensor
    """What was left out, of this vector and of what was left out before."""


class Matrix(NamedTuple):
    """A matrix within a flat vector."""

    start: int
    rows: int
    columns: int

    def view(self, flat: Tensor) -> Tensor:
        """The matrix where it lies."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


class Basis(NamedTuple):
    """What a matrix is projected on: orthonormal columns, for its columns (`left`) or its rows."""

    left: bool
    columns: Tensor


def encode(how: Compression, flat: Tensor, residual: Tensor | None = None) -> Encoded:
    """Compress a vector, together with what was left out before."""
    target = widened(flat) if residual is None else widened(flat) + residual
    decoded = _decoded(how, target, flat.dtype).to(flat.dtype)
    return Encoded(how.wire_bytes(flat.numel(), flat.element_size()), decoded, target - decoded)


def encode_low_rank(
    flat: Tensor, bases: Sequence[tuple[Matrix, Basis]], residual: Tensor | None = None
) -> Encoded:
    """The same with every matrix projected on its basis; all else travels as it is."""
    target = widened(flat) if residual is None else widened(flat) + residual
    arrives, sent = target.clone(), flat.numel()
    for matrix, basis in bases:
        inside, columns = matrix.view(target), basis.columns
        seen = columns @ (columns.T @ inside) if basis.left else (inside @ columns) @ columns.T
        matrix.view(arrives).copy_(seen)
        side = matrix.columns if basis.left else matrix.rows
        sent += side * columns.shape[1] - matrix.rows * matrix.columns
    decoded = arrives.to(flat.dtype)
    return Encoded(sent * flat.element_size(), decoded, target - decoded)


def first_basis(matrix: Matrix, rank: int, seed: int, like: Tensor) -> Basis:
    """A random one, the same for all who draw it with the same seed."""
    drawn = torch.Generator().manual_seed(seed)
    columns = torch.randn(matrix.columns, rank, generator=drawn, dtype=torch.float64)
    return Basis(False, torch.linalg.qr(columns).Q.to(like))


def next_basis(matrix: Matrix, basis: Basis, mean: Tensor) -> Basis:
    """The other side, as the mean of all has it: one step of a power iteration."""
    inside = matrix.view(widened(mean))
    seen = inside.T @ basis.columns if basis.left else inside @ basis.columns
    return Basis(not basis.left, torch.linalg.qr(seen).Q)


def matrices(layout: Layout, rank: int) -> list[list[Matrix]]:
    """Per part of a vector, the parameters that take fewer numbers in this rank than they have."""
    found = []
    for region in layout.regions:
        end = region.gradients + region.size_bytes
        inside = [slot for slot in layout.trained if region.gradients <= (slot.gradient or 0) < end]
        shaped = [_matrix(slot, region.gradients) for slot in inside if len(slot.shape) > 1]
        found.append([matrix for matrix in shaped if rank < min(matrix.rows, matrix.columns)])
    return found


def _matrix(slot: Slot, first: int) -> Matrix:
    """The dimension that is outermost in memory against all others."""
    assert slot.gradient is not None
    count = torch.Size(slot.shape).numel()
    rows = slot.shape[max(range(len(slot.shape)), key=lambda at: slot.stride[at])]
    width = slot.size_bytes // max(count, 1) or FLOAT_BYTES
    return Matrix((slot.gradient - first) // width, rows, count // max(rows, 1))


def widened(flat: Tensor) -> Tensor:
    """In a type that sums do not overflow: single precision at least."""
    return flat.float() if flat.dtype in NARROW else flat


def _decoded(how: Compression, target: Tensor, native: torch.dtype) -> Tensor:
    match how.name:
        case "fp16" | "bf16" if native not in NARROW:
            return target.to(torch.float16 if how.name == "fp16" else torch.bfloat16)
        case "int8":
            return _in_steps(target)
        case "topk":
            return _largest(target, how.kept(target.numel()))
    return target


def _in_steps(target: Tensor) -> Tensor:
    """Every chunk in whole steps of its largest number's 127th. Kept as floats: an integer holds no NaN."""
    count = target.numel()
    if not count:
        return target
    chunks = torch.nn.functional.pad(target, (0, -count % INT8_CHUNK)).view(-1, INT8_CHUNK)
    step = (chunks.abs().amax(1, keepdim=True) / LEVELS).float()
    step = torch.where(step == 0, torch.ones_like(step), step).to(target.dtype)
    return (chunks / step).round_().clamp_(-LEVELS, LEVELS).mul_(step).view(-1)[:count]


def _largest(target: Tensor, kept: int) -> Tensor:
    at = target.abs().topk(kept, sorted=False).indices
    return torch.zeros_like(target).index_copy_(0, at, target[at])
