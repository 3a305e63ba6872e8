"""Exchanges of a line with their gradients.

Outside a split layer every worker has whole activations and whole gradients. So what a layer gathers has a
gradient of which each worker takes its block, and what goes into it has one that is the sum of all workers'.
Where one split layer follows another, both are one exchange: each worker's gradient is partial, and is
reduced to who owns the block (`partial=True`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from paceline.parallel.layers.block_line import BlockLine


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, line: BlockLine, sizes: list[int], dim: int, partial: bool) -> Tensor:
        ctx.told = line, sizes, dim, partial
        return line.gather(own, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        line, sizes, dim, partial = ctx.told
        (gradient,) = gradients
        if partial:
            own = line.reduce_scatter(gradient, sizes, dim)
        else:
            own = gradient.narrow(dim, sum(sizes[: line.index]), sizes[line.index])
        return own, None, None, None, None


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, line: BlockLine) -> Tensor:
        ctx.line = line
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.line.all_reduce(gradients[0]), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, partial: Tensor, line: BlockLine) -> Tensor:
        return line.all_reduce(partial)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Any) -> Any:
        return gradients[0], None


class _Fork(Function):
    """A step of a recurrent layer: what is gathered goes on to the next step, and out of the layer."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, line: BlockLine, sizes: list[int]) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.told = line, sizes
        whole = line.gather(own, sizes, 1)
        return whole, whole.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        line, sizes = ctx.told
        further, out = gradients
        own = None if further is None else line.reduce_scatter(further, sizes, 1)
        if out is not None:
            block = out.narrow(1, sum(sizes[: line.index]), sizes[line.index])
            own = block if own is None else own + block
        return own, None, None


_GATHER: Any = _Gather.apply
_ENTER: Any = _Enter.apply
_SUM: Any = _Sum.apply
_FORK: Any = _Fork.apply


def gather(own: Tensor, line: BlockLine, sizes: list[int], dim: int, partial: bool) -> Tensor:
    """The whole; `partial`: only split layers get it, whose gradients have to be summed."""
    made: Tensor = _GATHER(own, line, sizes, dim, partial)
    return made


def enter(whole: Tensor, line: BlockLine) -> Tensor:
    """What goes into a split layer: its gradient is the sum of all workers'."""
    made: Tensor = _ENTER(whole, line) if torch.is_grad_enabled() and whole.requires_grad else whole
    return made


def total(partial: Tensor, line: BlockLine) -> Tensor:
    """The sum of all workers' partial results."""
    made: Tensor = _SUM(partial, line)
    return made


def fork(own: Tensor, line: BlockLine, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """The whole twice: for split layers (partial gradients), and for everybody (whole ones)."""
    further, out = _FORK(own, line, sizes)
    return further, out
