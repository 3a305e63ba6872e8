"""Ring attention: every worker keeps its queries, and keys and values go around.

Paper: Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
After N-1 hops every query has met every key; results of blocks are joined by their log-sum-exp. On the way
back keys and values go around once more, and their gradients behind them, so twice the bytes. While one
block is computed the next one travels.

Padding is cut off a block before its keys are used: here it lies along the attended dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.parallel.sequence.line import Hop, Line
from paceline.parallel.sequence.sharded import Sharded
from paceline.parallel.sequence.spacetime import Attend, as_rows, attend_over, from_rows

GRADIENTS = 2
"""Their first tag; keys and values have the two before."""


def ring(x: Sharded) -> Attend:
    """Attention along the dimension that is cut in `x`."""
    if x.line.size == 1:
        return attend_over(x.dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [as_rows(each, x.dim).contiguous() for each in (q, k, v)]
        made: Tensor = _Ring.apply(*rows, x.length, x.line)  # type: ignore[no-untyped-call]
        return from_rows(made, x.dim)

    return attend


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, length: int, line: Line) -> Tensor:
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -torch.inf)
        for block, on_the_way in _around(line, [k, v]):
            keys, values = (each.narrow(-2, 0, _valid(line, length, on_the_way)) for each in block)
            if keys.shape[-2]:
                out, lse = _joined(out, lse, *_attention(q, keys, values))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.length, ctx.line = length, line
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        line, length = ctx.line, ctx.length
        dq, own = torch.zeros_like(q), [torch.zeros_like(k), torch.zeros_like(v)]
        delta = (gradient * out).sum(-1, keepdim=True)
        coming: Hop | None = None
        for block, step in _around(line, [k, v]):
            into = own if step == 0 else [torch.zeros_like(k), torch.zeros_like(v)]
            valid = _valid(line, length, step)
            if valid:
                _backward(q, block, valid, gradient, delta, lse, dq, into)
            if step > 1:  # gradients of this block have come this far behind it
                assert coming is not None
                torch._foreach_add_(into, coming.wait())
            if step:
                coming = line.pass_on(into, GRADIENTS)
        if coming is not None:
            torch._foreach_add_(own, coming.wait())
        return dq, own[0], own[1], None, None


def _around(line: Line, block: list[Tensor]) -> Any:
    """Every worker's block, from one's own to the next worker's, and how many hops it has come."""
    for step in range(line.size):
        hop = line.pass_on(block) if step < line.size - 1 else None
        yield block, step
        block = block if hop is None else hop.wait()


def _valid(line: Line, length: int, step: int) -> int:
    """How much of the block that came so many hops is no padding."""
    part = line.part(length)
    return min(part, max(0, length - (line.rank - step) % line.size * part))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Of one block, with the log of the sum of its weights."""
    scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.sub_(lse).exp_() @ v, lse


def _joined(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp() + more * (more_lse - both).exp(), both


def _backward(
    q: Tensor,
    block: list[Tensor],
    valid: int,
    gradient: Tensor,
    delta: Tensor,
    lse: Tensor,
    dq: Tensor,
    into: list[Tensor],
) -> None:
    """Add what one block has to do with the gradients of queries, keys and values."""
    k, v = (each.narrow(-2, 0, valid) for each in block)
    scale = q.shape[-1] ** -0.5
    weights = (q @ k.mT).mul_(scale).sub_(lse).exp_()
    scores = (gradient @ v.mT).sub_(delta).mul_(weights).mul_(scale)
    dq.add_(scores @ k)
    into[0].narrow(-2, 0, valid).add_(scores.mT @ q)
    into[1].narrow(-2, 0, valid).add_(weights.mT @ gradient)
