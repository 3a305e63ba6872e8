"""The codecs: a flat vector in, what arrives of it, its bytes on the wire, and what was left out.

Nothing is packed into bytes here: workers of one host read each other's memory, where packing gains nothing.
What counts is that the numbers are those of a packed exchange; what travels between hosts (`wire`) is packed
by `wire_form`, which arrives at the same numbers. NaN and infinity come out as no finite number, never as a
number, so that whoever checks for them still finds them.

`powersgd` here projects every matrix on one side of the last mean, by turns (as ACP-SGD does: Zhang et al.,
ICDCS 2023). So one exchange stays one, where the paper has two. Both thin matrices travel: whoever takes the
product need not know which mean came last. It is taken by sums in a fixed order, to the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.protocols.rules.compression import FLOAT_BYTES, INT8_CHUNK, Compression
from paceline.store.layout import Layout, Slot

NARROW = (torch.float16, torch.bfloat16)
LEVELS = 127
"""Steps from zero to the largest number of a chunk, on either side."""
BLOCK = 64 * INT8_CHUNK
"""Numbers that are handled at once, while they are in cache."""


class Form(IntEnum):
    """How a vector may travel, by its number on the wire."""

    WHOLE = 0
    """As it is."""
    FP16 = 1
    BF16 = 2
    STEPS = 3
    """The step of every chunk, and whole numbers of steps."""
    PLACES = 4
    """The places of some numbers, and these; the rest is zero."""
    FACTORS = 5
    """Every matrix as two thin ones, and what is in no matrix."""


class Wire(NamedTuple):
    """What travels of a vector between hosts. Made only where it does."""

    form: Form
    kept: int
    """How many numbers are kept, or the rank."""
    tensors: tuple[Tensor, ...]


class Encoded(NamedTuple):
    """What becomes of a vector."""

    size_bytes: int
    decoded: Tensor
    """What arrives, in the vector's own type."""
    residual: Tensor
    """What was left out, of this vector and of what was left out before."""
    wire: Wire
    """Its tensors are left out unless they were asked for."""


WHOLE = Wire(Form.WHOLE, 0, ())


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


def encode(how: Compression, flat: Tensor, residual: Tensor | None = None, *, wired: bool = False) -> Encoded:
    """Compress a vector, together with what was left out before. `wired`: it is to travel."""
    target = widened(flat) if residual is None else widened(flat) + residual
    seen, wire = _decoded(how, target, flat.dtype, wired)
    decoded = seen.to(flat.dtype)
    if wire.form is Form.WHOLE:
        wire = Wire(Form.WHOLE, 0, (decoded,))
    return Encoded(how.wire_bytes(flat.numel(), flat.element_size()), decoded, target - decoded, wire)


def encode_low_rank(
    flat: Tensor, bases: Sequence[tuple[Matrix, Basis]], residual: Tensor | None = None
) -> Encoded:
    """The same with every matrix projected on its basis; all else travels as it is."""
    target = widened(flat) if residual is None else widened(flat) + residual
    arrives, factors, rank = target.clone(), [], 0
    for matrix, basis in bases:
        inside, columns = matrix.view(target), basis.columns
        sides = (columns, inside.T @ columns) if basis.left else (inside @ columns, columns)
        multiply(*sides, into=matrix.view(arrives))
        factors += [side.contiguous() for side in sides]
        rank = columns.shape[1]
    decoded = arrives.to(flat.dtype)
    rest = [decoded[start:stop] for start, stop in between([each for each, _ in bases], flat.numel())]
    wire = Wire(Form.FACTORS, rank, (*factors, *rest))
    size = sum(each.numel() * each.element_size() for each in wire.tensors)
    return Encoded(size, decoded, target - decoded, wire)


def in_steps(levels: Tensor, steps: Tensor, into: Tensor) -> None:
    """Put together what was taken apart into whole steps."""
    wide = torch.promote_types(into.dtype, torch.float32)
    for start in range(0, into.numel(), BLOCK):
        some = levels[start : start + BLOCK].to(wide)
        scales = steps[start // INT8_CHUNK : -(-(start + some.numel()) // INT8_CHUNK)].to(wide)
        some.mul_(scales.repeat_interleave(INT8_CHUNK)[: some.numel()])
        into[start : start + BLOCK].copy_(some)


def multiply(tall: Tensor, wide: Tensor, *, into: Tensor) -> None:
    """The product of thin matrices, rows first. A library's has other bits on another processor."""
    rows = max(1, BLOCK // max(into.shape[1], 1))
    for start in range(0, into.shape[0], rows):
        some = tall[start : start + rows]
        total = torch.outer(some[:, 0], wide[:, 0])
        for at in range(1, wide.shape[1]):
            total.add_(torch.outer(some[:, at], wide[:, at]))
        into[start : start + rows].copy_(total)


def between(found: Sequence[Matrix], count: int) -> list[tuple[int, int]]:
    """What of a vector lies in none of its matrices, from where to where."""
    ends = [(each.start, each.start + each.rows * each.columns) for each in sorted(found)]
    edges = [0, *(edge for pair in ends for edge in pair), count]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


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
        found.append(
            [each for each in shaped if rank * (each.rows + each.columns) < each.rows * each.columns]
        )
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


def _decoded(how: Compression, target: Tensor, native: torch.dtype, wired: bool) -> tuple[Tensor, Wire]:
    """What arrives, and what travels of it; of a vector that travels as it is, nothing is said yet."""
    match how.name:
        case "fp16" | "bf16" if native not in NARROW:
            half = target.to(torch.float16 if how.name == "fp16" else torch.bfloat16)
            return half, Wire(Form.FP16 if how.name == "fp16" else Form.BF16, 0, (half,))
        case "int8":
            return _stepped(target, wired)
        case "topk":
            return _largest(target, how.kept(target.numel()), native)
    return target, WHOLE


def _stepped(target: Tensor, wired: bool) -> tuple[Tensor, Wire]:
    """Every chunk in whole steps of its largest number's 127th. Kept as floats, since integers know no NaN:
    on the wire that is a 0, times the step of its chunk. Nor do they know -0: 0 is added."""
    count = target.numel()
    if not count:
        return target, WHOLE
    chunks = torch.nn.functional.pad(target, (0, -count % INT8_CHUNK)).view(-1, INT8_CHUNK)
    step = (chunks.abs().amax(1, keepdim=True) / LEVELS).float()
    step = torch.where(step == 0, torch.ones_like(step), step)
    wide = step.to(target.dtype)
    levels = (chunks / wide).round_().clamp_(-LEVELS, LEVELS).add_(0.0)
    wire = Wire(Form.STEPS, 0, ())
    if wired:
        whole = levels.nan_to_num(0.0).to(torch.int8).view(-1)[:count]
        wire = Wire(Form.STEPS, 0, (step.view(-1), whole))
    return levels.mul_(wide).view(-1)[:count], wire


def _largest(target: Tensor, kept: int, native: torch.dtype) -> tuple[Tensor, Wire]:
    at = target.abs().topk(kept, sorted=False).indices
    largest = target[at]
    wire = WHOLE
    if target.numel() <= torch.iinfo(torch.int32).max:
        wire = Wire(Form.PLACES, kept, (at.to(torch.int32), largest.to(native)))
    return torch.zeros_like(target).index_copy_(0, at, largest), wire
