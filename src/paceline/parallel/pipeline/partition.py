"""Cuts a row of blocks into stages so that the slowest is as fast as can be: an exact dynamic program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from paceline.errors import ConfigError


def partition(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Where stages begin, the first one left out: blocks [0, c1), [c1, c2), ... of which none is empty.

    Of all cuts with the smallest slowest stage it gives one whose stages before it are the least loaded in
    the same sense; the same costs always give the same cuts.
    """
    blocks = len(costs)
    check_blocks(blocks, stages)
    sums = (0.0, *accumulate(costs))
    best = [[inf] * (blocks + 1) for _ in range(stages + 1)]
    cut = [[0] * (blocks + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        for end in range(stage, blocks - (stages - stage) + 1):
            for start in range(stage - 1, end):
                slowest = max(best[stage - 1][start], sums[end] - sums[start])
                if slowest < best[stage][end]:
                    best[stage][end], cut[stage][end] = slowest, start
    return _followed(cut, stages, blocks)


def _followed(cut: list[list[int]], stages: int, blocks: int) -> tuple[int, ...]:
    cuts, end = [], blocks
    for stage in range(stages, 0, -1):
        end = cut[stage][end]
        cuts.append(end)
    return tuple(reversed(cuts[:-1]))


def check_blocks(blocks: int, stages: int) -> None:
    """Enough blocks for all stages."""
    if blocks < stages:
        raise ConfigError(
            f"the model has {blocks} blocks, and the mesh {stages} stages, each of which needs one. "
            f"Use --mesh stage={blocks} or less, or give smaller blocks."
        )


def check_cuts(cuts: Sequence[int], blocks: int, stages: int) -> tuple[int, ...]:
    """Cuts that were made by hand."""
    whole = (0, *cuts, blocks)
    if len(cuts) != stages - 1 or any(after <= before for before, after in pairwise(whole)):
        raise ConfigError(
            f"cuts={list(cuts)} do not cut {blocks} blocks into {stages} stages. Give {stages - 1} "
            f"increasing numbers between 1 and {blocks - 1}: where stages 1 to {stages - 1} begin."
        )
    return tuple(cuts)
