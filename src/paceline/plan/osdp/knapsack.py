"""The exact search for one batch size: a multiple-choice knapsack over memory, for every height of the surge.

Memory is the sum of what operators hold plus the largest surge. The largest is handled exactly: for every
possible height, only options below it take part, and the sum has the rest of the limit.

Three things make it fast without giving up exactness. A height whose linear relaxation cannot beat the
best plan found is skipped. Within a height, an option is left out if the relaxation with that option
cannot beat it either (its price in Lagrange's sense is too high): mostly a few operators remain open.
Those few are a knapsack table.

Memory is counted in units above the least that each operator can do with, rounded up: a plan never
exceeds the limit, and is optimal among plans of that granularity."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.plan.osdp.options import Option
from paceline.plan.profile.units import MIB

MOST_UNITS = 65536
"""The table's width; a wider range of memory is counted in larger units."""
EPSILON = 1e-12
MANY, ROUGH = 200, 1e-4
"""Layers of many sizes whose time is in proportion to their size can be combined in countless ways that
differ by nothing one could measure: above so many operators, a plan within this of the best is good
enough."""
Options = Sequence[Sequence[Option]]


class Solution(NamedTuple):
    """The fastest choice that fits."""

    seconds: float
    memory: int
    """What operators hold, plus the largest surge."""
    chosen: tuple[Option, ...]


def solve(options: Options, limit: int, unit: int = MIB, tolerance: float | None = None) -> Solution | None:
    """The fastest plan within the limit; None if nothing fits. `tolerance`: how much slower than the fastest
    it may be at most, relative; by default 0, and `ROUGH` for more than `MANY` operators."""
    if tolerance is None:
        tolerance = ROUGH if len(options) > MANY else 0.0
    slack = 1 - max(tolerance, EPSILON)
    best: Solution | None = None
    for relaxed in sorted(_relaxations(options, limit)):
        if best is not None and relaxed.seconds >= best.seconds * slack:
            break
        allowed = [_below(each, relaxed.height) for each in options]
        room = limit - relaxed.height
        best = _faster(best, _greedy(allowed, room))
        if relaxed.seconds >= best.seconds * slack:
            break
        best = _faster(best, _search(_open(allowed, relaxed, best.seconds), room, unit))
    return best


def smallest(options: Options) -> int:
    """The least memory that any plan takes."""
    sizes = []
    for height in _heights(options):
        low = [min((o.memory for o in each if o.surge <= height), default=-1) for each in options]
        if -1 not in low:
            sizes.append(sum(low) + height)
    return min(sizes)


def measured(chosen: Sequence[Option]) -> Solution:
    """What a choice comes to."""
    memory = sum(option.memory for option in chosen) + max((option.surge for option in chosen), default=0)
    return Solution(sum(option.seconds for option in chosen), memory, tuple(chosen))


def _faster(best: Solution | None, found: Solution | None) -> Solution:
    assert best is not None or found is not None
    if best is None or found is None:
        return best or found  # type: ignore[return-value]
    return found if found.seconds < best.seconds else best


def _heights(options: Options) -> list[int]:
    return sorted({option.surge for each in options for option in each})


def _below(each: Sequence[Option], height: int) -> list[Option]:
    """Options within a height that no other beats in both time and memory, the smallest first."""
    kept: list[Option] = []
    for option in sorted(
        (o for o in each if o.surge <= height), key=lambda o: (o.memory, o.seconds, o.surge)
    ):
        if not kept or option.seconds < kept[-1].seconds:
            kept.append(option)
    return kept


# -- bounds -----------------------------------------------------------------------------------


class _Relaxed(NamedTuple):
    """A height, the time that no plan within it can go below, and what a byte is worth there."""

    seconds: float
    height: int
    price: float


class _Hull(NamedTuple):
    """An operator's options as a convex curve: seconds saved for each further byte, steepest first."""

    memory: int
    seconds: float
    steps: tuple[tuple[float, int], ...]
    next_surge: float
    """The height at which there are more options."""


def _relaxations(options: Options, limit: int) -> list[_Relaxed]:
    """For every height that can fit."""
    merged: dict[tuple[Option, ...], int] = {}
    for each in options:
        merged[tuple(each)] = merged.get(tuple(each), 0) + 1
    hulls = [_Hull(0, 0.0, (), -1)] * len(merged)
    made = []
    for height in _heights(options):
        for place, each in enumerate(merged):
            if hulls[place].next_surge <= height:
                hulls[place] = _hull(each, height)
        room = limit - height - sum(h.memory * n for h, n in zip(hulls, merged.values(), strict=True))
        seconds = sum(h.seconds * n for h, n in zip(hulls, merged.values(), strict=True))
        if room >= 0 and seconds < float("inf"):
            steps = [
                (s, size * n) for h, n in zip(hulls, merged.values(), strict=True) for s, size in h.steps
            ]
            made.append(_relax(seconds, steps, room, height))
    return made


def _relax(seconds: float, steps: list[tuple[float, int]], room: int, height: int) -> _Relaxed:
    for slope, size in sorted(steps, reverse=True):
        taken = min(size, room)
        seconds -= slope * taken
        room -= taken
        if taken < size:
            return _Relaxed(seconds, height, slope)
    return _Relaxed(seconds, height, 0.0)


def _hull(each: Sequence[Option], height: int) -> _Hull:
    further = min((o.surge for o in each if o.surge > height), default=float("inf"))
    kept = _below(each, height)
    if not kept:
        return _Hull(0, float("inf"), (), further)
    steps = tuple((_slope(a, b), b.memory - a.memory) for a, b in pairwise(_corners(kept)))
    return _Hull(kept[0].memory, kept[0].seconds, steps, further)


def _corners(kept: Sequence[Option]) -> list[Option]:
    corners = [kept[0]]
    for option in kept[1:]:
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], option):
            corners.pop()
        corners.append(option)
    return corners


def _slope(a: Option, b: Option) -> float:
    return (a.seconds - b.seconds) / (b.memory - a.memory)


# -- plans ------------------------------------------------------------------------------------


def _greedy(allowed: list[list[Option]], room: int) -> Solution:
    """A good plan: from the smallest, the steps that save most per byte, as long as they fit."""
    steps = [
        (_slope(a, b), place, a, b) for place, each in enumerate(allowed) for a, b in pairwise(_corners(each))
    ]
    chosen = [each[0] for each in allowed]
    room -= sum(option.memory for option in chosen)
    for _, place, a, b in sorted(steps, key=lambda step: (-step[0], step[1])):
        if chosen[place] == a and b.memory - a.memory <= room:
            chosen[place] = b
            room -= b.memory - a.memory
    return measured(chosen)


def _open(allowed: list[list[Option]], relaxed: _Relaxed, best: float) -> list[list[Option]]:
    """The options that a plan faster than the best one can still have."""
    left = []
    for each in allowed:
        priced = [option.seconds + relaxed.price * option.memory for option in each]
        most = best - relaxed.seconds + min(priced) + EPSILON * best
        left.append([option for option, price in zip(each, priced, strict=True) if price <= most])
    return left


def _search(options: list[list[Option]], room: int, unit: int) -> Solution | None:
    """The knapsack itself: at every width, the least time of the operators so far."""
    room -= sum(each[0].memory for each in options)
    if room < 0:
        return None
    wanted = sum(each[-1].memory - each[0].memory for each in options)
    if wanted <= room:
        return measured([each[-1] for each in options])
    unit = max(unit, -(-room // MOST_UNITS), 1)
    times = np.zeros(room // unit + 1)
    undecided = [each for each in options if len(each) > 1]
    picks = np.zeros((len(undecided), len(times)), dtype=np.uint8)
    for row, each in enumerate(undecided):
        times = _add(times, picks[row], each, unit)
    chosen = iter(_walk_back(undecided, picks, int(np.argmin(times)), unit))
    return measured([next(chosen) if len(each) > 1 else each[0] for each in options])


def _sizes(each: Sequence[Option], unit: int) -> list[int]:
    return [-(-(option.memory - each[0].memory) // unit) for option in each]


def _add(times: np.ndarray, picks: np.ndarray, each: Sequence[Option], unit: int) -> np.ndarray:
    """One more operator, in a new table: one that is changed in place would take an operator twice."""
    best = times + each[0].seconds
    for pick, size in enumerate(_sizes(each, unit)):
        if pick and size < len(times):
            tried = times[: len(times) - size] + each[pick].seconds
            better = tried < best[size:]
            best[size:][better] = tried[better]
            picks[size:][better] = pick
    return best


def _walk_back(options: list[list[Option]], picks: np.ndarray, width: int, unit: int) -> list[Option]:
    chosen = []
    for row in range(len(options) - 1, -1, -1):
        pick = int(picks[row, width])
        chosen.append(options[row][pick])
        width -= _sizes(options[row], unit)[pick]
    return chosen[::-1]
