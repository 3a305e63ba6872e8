"""Sampling, the primitive of PSP: drawing a few others, and how likely a draw is to pass.

Random numbers are a function of (seed, number), so a protocol only saves a counter.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil, comb, inf, log1p
from random import Random


def draw_sample(members: Sequence[int], worker: int, size: int, uniform: Callable[[], float]) -> list[int]:
    """`size` distinct others out of the members, every such set equally likely.

    Floyd's method: one random number each, however many members there are. The last member stands
    in for the worker itself, which is never drawn.
    """
    others = len(members) - 1
    chosen: dict[int, None] = {}
    for last in range(others - size, others):
        at = int(uniform() * (last + 1))
        chosen[last if at in chosen else at] = None
    return [members[-1] if members[at] == worker else members[at] for at in chosen]


def may_lag(size: int, pass_fraction: float) -> int:
    """How many of a sample may lag if this share of it must not."""
    return size - ceil(pass_fraction * size - 1e-9)


@lru_cache(maxsize=1 << 16)
def chance(lagging: int, others: int, size: int, allowed: int = 0) -> float:
    """The probability that at most `allowed` of a sample of `size` lag: hypergeometric."""
    passing = sum(comb(lagging, k) * comb(others - lagging, size - k) for k in range(allowed + 1))
    return passing / comb(others, size)


class Hazards(dict[int, float]):
    """-log(1 - chance) by how many others lag, infinite when a look is sure to pass."""

    def __init__(self, others: int, sample: int, pass_fraction: float) -> None:
        self.others = others
        self.size = min(sample, others)
        self.allowed = may_lag(self.size, pass_fraction)

    def __missing__(self, lagging: int) -> float:
        passing = chance(lagging, self.others, self.size, self.allowed)
        self[lagging] = hazard = inf if passing >= 1.0 else -log1p(-passing)
        return hazard


hazards = lru_cache(maxsize=16)(Hazards)


@lru_cache(maxsize=256)
def uniforms(seed: int, block: int) -> array[float]:
    """Random numbers in [0, 1): number n of a seed is uniforms(seed, n >> 10)[n & 1023]."""
    random = Random(f"{seed}, {block}").random
    return array("d", [random() for _ in range(1024)])
