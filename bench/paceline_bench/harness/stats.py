"""Medians, spreads, and how sure a ratio is: one definition for all benchmarks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

RESAMPLES = 2000


class Spread(msgspec.Struct, frozen=True):
    """What many measurements of one thing looked like. Seconds, unless its name says otherwise."""

    median: float
    p10: float
    p90: float
    smallest: float
    largest: float
    count: int


class Interval(msgspec.Struct, frozen=True):
    """Where a figure lies with 95 % confidence, by bootstrap over blocks."""

    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Sum up measurements."""
    ordered = sorted(values)
    last = len(ordered) - 1
    p10, p90 = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Spread(median(ordered), p10, p90, ordered[0], ordered[-1], len(ordered))


def at_edge(best: float, tried: Sequence[float]) -> str:
    """A remark where the best learning rate is the first or last of several: a better one may lie beyond."""
    if len(set(tried)) < 2 or min(tried) < best < max(tried):
        return ""
    which = "lowest" if best == min(tried) else "highest"
    return f"its best rate is the {which} of those tried"


def bootstrap(items: int, figure: Callable[[list[int]], float], seed: int) -> Interval:
    """Resample the indices of `items` blocks; what `figure` makes of them lies where?"""
    rng = random.Random(seed)
    draws = (rng.choices(range(items), k=items) for _ in range(RESAMPLES))
    seen = sorted(figure(draw) for draw in draws)
    return Interval(seen[int(0.025 * RESAMPLES)], seen[int(0.975 * RESAMPLES)])


def ratio_of_medians(above: list[list[float]], below: list[list[float]], seed: int) -> tuple[float, Interval]:
    """How many times longer `above` takes than `below`; both as blocks measured in turns."""

    def figure(blocks: list[int]) -> float:
        return median(_pooled(above, blocks)) / median(_pooled(below, blocks))

    everything = list(range(len(below)))
    return figure(everything), bootstrap(len(below), figure, seed)


def _pooled(blocks: list[list[float]], chosen: list[int]) -> list[float]:
    return [value for index in chosen for value in blocks[index]]


def paired_ratio(above: list[float], below: list[float], seed: int) -> tuple[float, Interval]:
    """How many times longer `above` takes, by the median of neighbours' ratios: slow drifts cancel out."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return median(ratios), bootstrap(len(ratios), lambda chosen: median(ratios[i] for i in chosen), seed)
