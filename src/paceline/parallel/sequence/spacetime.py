"""A layer of a space-time transformer: a block that attends over space, then one that attends over time.

Tensors are [batch, time, space, width]. It is plain PyTorch, and the ground on which ways to split sequences
are compared: each computes this layer, with these weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import ConfigError

TIME, SPACE, HEADS = 1, 2, 3
"""Dimensions of queries, keys and values: [batch, time, space, heads, width of a head]."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values in, their attention out, all of that shape."""


def as_rows(x: Tensor, dim: int) -> Tensor:
    """[..., tokens along that dimension, width of a head]."""
    return x.movedim(dim, -2)


def from_rows(x: Tensor, dim: int) -> Tensor:
    """The opposite."""
    return x.movedim(-2, dim)


def attend_over(dim: int) -> Attend:
    """Attention along time or space, with all that is not attended over folded into the batch."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(as_rows(q, dim), as_rows(k, dim), as_rows(v, dim))
        return from_rows(mixed, dim)

    return attend


def to_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, from where one linear layer made them."""
    shape = (*x.shape[:-1], 3, heads, x.shape[-1] // (3 * heads))
    return x.view(shape).unbind(-3)


class Block(nn.Module):
    """Attention along one dimension, then two linear layers for every token, both with a shortcut."""

    def __init__(self, width: int, heads: int, dim: int, grow: int = 4) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"a width of {width} cannot be shared out among {heads} heads.")
        self.heads, self.dim = heads, dim
        self.attention_norm, self.token_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, grow * width), nn.Linear(grow * width, width)

    def forward(self, x: Tensor, attend: Attend | None = None) -> Tensor:
        """`attend` takes the place of ordinary attention."""
        q, k, v = to_heads(self.queries(self.attention_norm(x)), self.heads)
        mixed = (attend or attend_over(self.dim))(q, k, v)
        x = x + self.out(mixed.flatten(-2))
        made: Tensor = x + self.down(F.gelu(self.up(self.token_norm(x))))
        return made


class SpaceTimeLayer(nn.Module):
    """A spatial and a temporal block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.spatial, self.temporal = Block(width, heads, SPACE), Block(width, heads, TIME)

    def forward(self, x: Tensor) -> Tensor:
        """Unsplit."""
        made: Tensor = self.temporal(self.spatial(x))
        return made
