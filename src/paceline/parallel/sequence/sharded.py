"""Dynamic sequence parallelism: a tensor is cut along one dimension, and which one changes on the way.

Paper: Zhao, Cheng, Chen, Zheng, Liu, Yang, You, "DSP: Dynamic Sequence Parallelism for Multi-Dimensional
Transformers", ICML 2025. A block that attends over one dimension is computed locally while another one is
cut; between blocks one all-to-all cuts the other way.

A dimension of length L is padded at its end to a multiple of N and cut in N equal parts. Only the dimension
that is cut ever has padding, so nothing that attends over others sees it. Here the true length travels with
the tensor; the authors' code keeps a dictionary of paddings for the whole process.

Gradients: with a line that is `scaled`, those of all parameters are right once they are averaged over the
line, as all-reduce and DDP do. For that `gather` multiplies by N on the way back and `split` divides by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.errors import ConfigError
from paceline.parallel.sequence.line import Line


@dataclass(frozen=True, slots=True)
class Sharded:
    """One worker's part of a tensor."""

    local: Tensor
    dim: int
    """The dimension that is cut."""
    length: int
    """Its true length, of the whole tensor and without padding."""
    line: Line

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return *self.local.shape[: self.dim], self.length, *self.local.shape[self.dim + 1 :]

    @property
    def offset(self) -> int:
        """Where this worker's part begins in the whole."""
        return self.line.rank * self.line.part(self.length)

    @property
    def valid(self) -> Tensor:
        """This worker's part without padding."""
        return self.local.narrow(self.dim, 0, self.line.valid(self.length))

    def map(self, block: Callable[[Tensor], Tensor]) -> Sharded:
        """Compute something on every part by itself: it must not look along the dimension that is cut.

        Random numbers in it (dropout) are every worker's own.
        """
        if isinstance(block, nn.Module) and self.line.size > 1:
            refuse_batch_norm(block)
        with self.line.own_numbers(self.local.device):
            made = block(self.local)
        if made.dim() <= self.dim or made.shape[self.dim] != self.local.shape[self.dim]:
            raise ConfigError(
                f"a block made {tuple(made.shape)} of {tuple(self.local.shape)}, but dimension {self.dim} "
                "is split over the workers and must keep its place. Gather first, or switch."
            )
        return replace(self, local=made)


def split(x: Tensor, dim: int, line: Line) -> Sharded:
    """Every worker keeps its part of a tensor that all of them have. Sends nothing; an all-gather back."""
    dim = _checked(x, dim)
    line.check_length(dim, x.shape[dim])
    local = x if line.size == 1 else _Split.apply(x, dim, line)  # type: ignore[no-untyped-call]
    return Sharded(local, dim, x.shape[dim], line)


def switch(x: Sharded, dim: int) -> Sharded:
    """Cut along another dimension instead: one all-to-all, and one back."""
    dim, line = _checked(x.local, dim), x.line
    if dim == x.dim:
        return x
    length = x.local.shape[dim]
    line.check_length(dim, length)
    if line.size == 1:
        return replace(x, dim=dim, length=length)
    local = _Switch.apply(x.local, x.dim, x.length, dim, line)  # type: ignore[no-untyped-call]
    return Sharded(local, dim, length, line)


def gather(x: Sharded) -> Tensor:
    """The whole tensor, on every worker: one all-gather. Sends nothing back."""
    if x.line.size == 1:
        return x.local
    whole: Tensor = _GatherSequence.apply(x.local, x.dim, x.length, x.line)  # type: ignore[no-untyped-call]
    return whole


def mean(x: Sharded) -> Tensor:
    """The mean over all elements on all workers, padding left out: a loss that needs no gather."""
    if x.line.size == 1:
        return x.local.mean()
    made: Tensor = _Total.apply(x.valid.sum() / prod(x.shape), x.line)  # type: ignore[no-untyped-call]
    return made


# -- with gradients ---------------------------------------------------------------------------


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.length, ctx.line = dim, x.shape[dim], line
        return own_part(x, dim, line, line.pad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        whole = joined(ctx.line.all_gather(gradient), ctx.dim, ctx.length)
        return whole / ctx.line.factor, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, line: Line) -> Tensor:
        ctx.dim, ctx.line = dim, line
        return joined(line.all_gather(x), dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return own_part(gradient, ctx.dim, ctx.line) * ctx.line.factor, None, None, None


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, old: int, old_length: int, new: int, line: Line) -> Tensor:
        ctx.old, ctx.new, ctx.new_length, ctx.line = old, new, x.shape[new], line
        return joined(line.all_to_all(stacked(x, new, line.size, line.pad)), old, old_length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces = ctx.line.all_to_all(stacked(gradient, ctx.old, ctx.line.size))
        return joined(pieces, ctx.new, ctx.new_length), None, None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.all_reduce(x.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient * ctx.line.factor, None


# -- cutting and joining ----------------------------------------------------------------------


def stacked(x: Tensor, dim: int, parts: int, pad: float = 0.0) -> Tensor:
    """Equal parts of a dimension, one after another in memory, the last ones padded."""
    length = x.shape[dim]
    part = -(-length // parts)
    if part * parts == length:
        return _cut(x, dim, parts).contiguous()
    full, rest = divmod(length, part)
    made = x.new_empty((parts, *x.shape[:dim], part, *x.shape[dim + 1 :]))
    made[:full] = _cut(x.narrow(dim, 0, full * part), dim, full)
    if rest:
        made[full].narrow(dim, 0, rest).copy_(x.narrow(dim, full * part, rest))
        fill(made[full].narrow(dim, rest, part - rest), pad)
    fill(made[full + bool(rest) :], pad)
    return made


def _cut(x: Tensor, dim: int, parts: int) -> Tensor:
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return x.reshape(shape).movedim(dim, 0)


def joined(pieces: Tensor, dim: int, length: int) -> Tensor:
    """The opposite: parts by rank become one dimension again, of its true length."""
    whole = pieces.movedim(0, dim).flatten(dim, dim + 1)
    return whole.narrow(dim, 0, length).contiguous()


def own_part(x: Tensor, dim: int, line: Line, pad: float = 0.0) -> Tensor:
    """This worker's part, padded, in memory of its own: the whole need not stay."""
    part, valid = line.part(x.shape[dim]), line.valid(x.shape[dim])
    made = x.new_empty((*x.shape[:dim], part, *x.shape[dim + 1 :]))
    made.narrow(dim, 0, valid).copy_(x.narrow(dim, min(line.rank * part, x.shape[dim] - valid), valid))
    fill(made.narrow(dim, valid, part - valid), pad)
    return made


def fill(x: Tensor, pad: float) -> None:
    """Padding; tensors without fractions (masks, labels) get zeros."""
    x.fill_(pad if x.is_floating_point() else 0)


def _checked(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"a tensor of shape {tuple(x.shape)} has no dimension {dim} to cut.")
    return dim % x.dim()


def refuse_batch_norm(block: nn.Module) -> None:
    """Statistics over a batch would be those of one worker's part, and of padding."""
    for name, module in block.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"{name or 'a block'} is a {type(module).__name__}: it would take its statistics from one "
                "worker's part of the tokens. Use LayerNorm, or put it outside the split region."
            )
