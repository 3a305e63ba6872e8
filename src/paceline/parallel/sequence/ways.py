"""Four ways to compute a space-time layer whose tokens are cut along time, and the bytes that each sends.

For a tensor of M bytes on N workers a switch sends (M/N)(N-1)/N from every worker, and a gather (M/N)(N-1).
So dynamic switching sends about 2M/N per layer forward, Ulysses 4M/N, ring attention 2M and Megatron's 8M;
backward as much again, ring attention twice as much. Volumes are counted from the collectives, with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

from torch import nn

from paceline.parallel.sequence.line import Line
from paceline.parallel.sequence.megatron import MegatronLayer
from paceline.parallel.sequence.ring import ring
from paceline.parallel.sequence.sharded import Sharded, switch
from paceline.parallel.sequence.spacetime import SPACE, TIME, SpaceTimeLayer, attend_over
from paceline.parallel.sequence.ulysses import ulysses

Computed = Callable[[Sharded], Sharded]


def dynamic(layer: SpaceTimeLayer) -> Computed:
    """Time is cut in the spatial block, space in the temporal one."""

    def compute(x: Sharded) -> Sharded:
        x = switch(x.map(layer.spatial), SPACE)
        return switch(x.map(layer.temporal), TIME)

    return compute


def with_ulysses(layer: SpaceTimeLayer) -> Computed:
    """Time stays cut; temporal attention exchanges queries, keys, values and results."""

    def compute(x: Sharded) -> Sharded:
        x = x.map(layer.spatial)
        return x.map(partial(layer.temporal, attend=ulysses(x, attend_over(TIME))))

    return compute


def with_ring(layer: SpaceTimeLayer) -> Computed:
    """Time stays cut; keys and values of temporal attention go around."""

    def compute(x: Sharded) -> Sharded:
        x = x.map(layer.spatial)
        return x.map(partial(layer.temporal, attend=ring(x)))

    return compute


WAYS = ("dynamic", "ulysses", "ring", "megatron")


def made(way: str, layer: SpaceTimeLayer, line: Line) -> tuple[Computed, nn.Module]:
    """How a layer is computed, and the module that holds this worker's weights."""
    if way == "megatron":
        rows = MegatronLayer(layer, line)
        return rows, rows
    return {"dynamic": dynamic, "ulysses": with_ulysses, "ring": with_ring}[way](layer), layer


def forward_bytes(way: str, shape: Sequence[int], workers: int, itemsize: int) -> int:
    """What one worker sends for a layer, by the formula; `shape` is that of the whole tensor."""
    batch, time, space, width = shape
    time, padded = (-(-length // workers) * workers for length in (time, space))
    whole = prod((batch, time, space, width)) * itemsize
    both = prod((batch, time, padded, width)) * itemsize
    match way:
        case "dynamic":
            return 2 * both // workers * (workers - 1) // workers
        case "ulysses":
            return 4 * whole // workers * (workers - 1) // workers
        case "ring":
            return 2 * whole // workers * (workers - 1)
        case _:
            return 8 * whole // workers * (workers - 1)


def backward_bytes(way: str, shape: Sequence[int], workers: int, itemsize: int) -> int:
    """The same for the backward pass."""
    return forward_bytes(way, shape, workers, itemsize) * (2 if way == "ring" else 1)
