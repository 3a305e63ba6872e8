"""Ulysses attention: tokens are cut everywhere but in attention, where heads are.

Paper: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", 2023. Queries, keys and values are switched from tokens to heads, the result is switched
back: four all-to-alls. It needs a number of heads that the workers divide.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paceline.errors import ConfigError
from paceline.parallel.sequence.line import AXIS
from paceline.parallel.sequence.sharded import Sharded, switch
from paceline.parallel.sequence.spacetime import HEADS, Attend


def ulysses(x: Sharded, plain: Attend) -> Attend:
    """Attention along the dimension that is cut in `x`; `plain` is that of one process."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_heads(q.shape[HEADS], x.line.size, "Ulysses")
        by_heads = [switch(replace(x, local=each), HEADS) for each in (q, k, v)]
        mixed = plain(*(each.local for each in by_heads))
        return switch(replace(by_heads[0], local=mixed), x.dim).local

    return attend


def check_heads(heads: int, workers: int, who: str) -> None:
    """Refuse heads that cannot be shared out."""
    if heads % workers:
        raise ConfigError(
            f"{who} splits attention by heads, and {heads} heads cannot be shared out among {workers} "
            f"workers along {AXIS}. Use a number of heads that {workers} divides, or dynamic switching."
        )
