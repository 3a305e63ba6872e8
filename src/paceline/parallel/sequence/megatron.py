"""Megatron's sequence parallelism: tokens are cut between blocks, heads and hidden units inside them.

Paper: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys 2023. Every
worker holds some rows of the weights. Before attention, and before the linear layers, tokens are gathered;
afterwards partial results are reduced and scattered: two of each in a block. The gathered tokens are kept for
the backward pass (the paper gathers them once more there, to save memory).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from paceline.parallel.sequence.line import Line
from paceline.parallel.sequence.sharded import Sharded, joined, stacked
from paceline.parallel.sequence.spacetime import Block, SpaceTimeLayer, attend_over, to_heads
from paceline.parallel.sequence.ulysses import check_heads


class MegatronBlock(nn.Module):
    """This worker's rows of a block; norms and the biases of results are everybody's."""

    def __init__(self, block: Block, line: Line) -> None:
        super().__init__()
        check_heads(block.heads, line.size, "Megatron's sequence parallelism")
        self.heads, self.dim, self.line = block.heads // line.size, block.dim, line
        self.attention_norm, self.token_norm = block.attention_norm, block.token_norm
        width = block.out.in_features
        thirds = [block.queries.weight.view(3, width, width), block.queries.bias.view(3, width)]
        self.queries, self.queries_bias = (
            nn.Parameter(self._rows(each, 1).flatten(0, 1).clone()) for each in thirds
        )
        self.out = nn.Parameter(self._rows(block.out.weight, 1).clone())
        self.up = nn.Parameter(self._rows(block.up.weight, 0).clone())
        self.up_bias = nn.Parameter(self._rows(block.up.bias, 0).clone())
        self.down = nn.Parameter(self._rows(block.down.weight, 1).clone())
        self.out_bias, self.down_bias = block.out.bias, block.down.bias

    def own(self) -> list[nn.Parameter]:
        """What this worker alone has: nobody else has gradients of it."""
        return [self.queries, self.queries_bias, self.out, self.up, self.up_bias, self.down]

    def _rows(self, x: Tensor, dim: int) -> Tensor:
        return x.detach().tensor_split(self.line.size, dim)[self.line.rank]

    def forward(self, x: Sharded) -> Sharded:
        """Tokens in, tokens out."""
        y = _gathered(replace(x, local=self.attention_norm(x.local)))
        q, k, v = to_heads(F.linear(y, self.queries, self.queries_bias), self.heads)
        mixed = attend_over(self.dim)(q, k, v).flatten(-2)
        x = replace(x, local=x.local + _scattered(F.linear(mixed, self.out), x) + self.out_bias)
        y = _gathered(replace(x, local=self.token_norm(x.local)))
        hidden = F.gelu(F.linear(y, self.up, self.up_bias))
        return replace(x, local=x.local + _scattered(F.linear(hidden, self.down), x) + self.down_bias)


class MegatronLayer(nn.Module):
    """This worker's rows of a space-time layer."""

    def __init__(self, layer: SpaceTimeLayer, line: Line) -> None:
        super().__init__()
        self.spatial, self.temporal = (
            MegatronBlock(layer.spatial, line),
            MegatronBlock(layer.temporal, line),
        )

    def forward(self, x: Sharded) -> Sharded:
        """Tokens in, tokens out."""
        made: Sharded = self.temporal(self.spatial(x))
        return made


def _gathered(x: Sharded) -> Tensor:
    if x.line.size == 1:
        return x.local
    made: Tensor = _Gathered.apply(x.local, x.dim, x.length, x.line)  # type: ignore[no-untyped-call]
    return made


def _scattered(partial: Tensor, like: Sharded) -> Tensor:
    if like.line.size == 1:
        return partial
    made: Tensor = _Scattered.apply(partial, like.dim, like.line)  # type: ignore[no-untyped-call]
    return made


class _Gathered(torch.autograd.Function):
    """All-gather; back, everybody's gradients are added up. (`gather` may assume that they are equal.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, line: Line) -> Tensor:
        ctx.dim, ctx.line = dim, line
        return joined(line.all_gather(x), dim, length)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.line.reduce_scatter(stacked(gradient, ctx.dim, ctx.line.size)), None, None, None


class _Scattered(torch.autograd.Function):
    """Reduce-scatter; back, an all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, line: Line) -> Tensor:
        ctx.dim, ctx.length, ctx.line = dim, x.shape[dim], line
        return line.reduce_scatter(stacked(x, dim, line.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return joined(ctx.line.all_gather(gradient), ctx.dim, ctx.length), None, None
