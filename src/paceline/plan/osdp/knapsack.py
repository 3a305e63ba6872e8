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
EXCHANGES = 20
"""How often a greedy plan is improved before the table is asked."""
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
        allowed = [below(each, relaxed.height) for each in options]
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


def below(each: Sequence[Option], height: int) -> list[Option]:
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


def _relaxations(options: Options, limit: int) -> list[_Relaxed]:
    """For every height that can fit."""
    merged: dict[tuple[Option, ...], int] = {}
    for each in options:
        merged[tuple(each)] = merged.get(tuple(each), 0) + 1
    curves = _Curves(list(merged), np.array(list(merged.values())))
    made = (curves.relax(limit, height) for height in _heights(options))
    return [relaxed for relaxed in made if relaxed is not None]


class _Curves:
    """Every operator's options as a convex curve: seconds saved for each further byte, steepest first."""

    def __init__(self, kinds: list[tuple[Option, ...]], counts: np.ndarray) -> None:
        steps = max(len(kind) for kind in kinds)
        self._kinds, self._counts = kinds, counts
        self._memory, self._seconds = np.zeros(len(kinds)), np.full(len(kinds), np.inf)
        self._slopes, self._sizes = np.zeros((len(kinds), steps)), np.zeros((len(kinds), steps))
        self._next = np.full(len(kinds), -1.0)
        """The height at which there are more options."""

    def relax(self, limit: int, height: int) -> _Relaxed | None:
        """The least time at this height if operators could be cut; None if nothing fits."""
        for place in np.flatnonzero(self._next <= height):
            self._bend(int(place), height)
        room = limit - height - float(self._memory @ self._counts)
        seconds = float(self._seconds @ self._counts)
        if room < 0 or seconds == np.inf:
            return None
        order = np.argsort(-self._slopes, axis=None, kind="stable")
        slopes, sizes = self._slopes.ravel()[order], (self._sizes * self._counts[:, None]).ravel()[order]
        filled = np.cumsum(sizes)
        last = int(np.searchsorted(filled, room, side="right"))
        seconds -= float(slopes[:last] @ sizes[:last])
        if last == len(slopes):
            return _Relaxed(seconds, height, 0.0)
        left = room - (float(filled[last - 1]) if last else 0.0)
        return _Relaxed(seconds - float(slopes[last]) * left, height, float(slopes[last]))

    def _bend(self, place: int, height: int) -> None:
        each = self._kinds[place]
        self._next[place] = min((o.surge for o in each if o.surge > height), default=np.inf)
        kept = below(each, height)
        if kept:
            self._memory[place], self._seconds[place] = kept[0].memory, kept[0].seconds
            self._slopes[place], self._sizes[place] = 0.0, 0.0
            for step, (a, b) in enumerate(pairwise(corners(kept))):
                self._slopes[place, step], self._sizes[place, step] = slope(a, b), b.memory - a.memory


def corners(kept: Sequence[Option]) -> list[Option]:
    """Those on the convex curve of time over memory."""
    corners = [kept[0]]
    for option in kept[1:]:
        while len(corners) > 1 and slope(corners[-2], corners[-1]) <= slope(corners[-2], option):
            corners.pop()
        corners.append(option)
    return corners


def slope(a: Option, b: Option) -> float:
    """Seconds that a byte more saves."""
    return (a.seconds - b.seconds) / (b.memory - a.memory)


# -- plans ------------------------------------------------------------------------------------


def _greedy(allowed: list[list[Option]], room: int) -> Solution:
    """A good plan: from the smallest, the steps that save most per byte, as long as they fit."""
    steps = [
        (slope(a, b), place, a, b) for place, each in enumerate(allowed) for a, b in pairwise(corners(each))
    ]
    chosen = [each[0] for each in allowed]
    room -= sum(option.memory for option in chosen)
    for _, place, a, b in sorted(steps, key=lambda step: (-step[0], step[1])):
        if chosen[place] == a and b.memory - a.memory <= room:
            chosen[place] = b
            room -= b.memory - a.memory
    _exchange(chosen, allowed, room)
    return measured(chosen)


def _exchange(chosen: list[Option], allowed: list[list[Option]], room: int) -> None:
    """Give one operator more and another less, as long as that saves time and still fits."""
    for _ in range(EXCHANGES):
        ups, downs = _moves(chosen, allowed, 1), _moves(chosen, allowed, -1)
        if not ups or not downs:
            return
        saved = np.array([m[0] for m in ups])[:, None] + np.array([m[0] for m in downs])[None]
        size = np.array([m[1] for m in ups])[:, None] + np.array([m[1] for m in downs])[None]
        saved[size > room] = 0.0
        up, down = divmod(int(np.argmax(saved)), len(downs))
        if saved[up, down] <= 0 or ups[up][2] == downs[down][2]:
            return
        for _, _, place, option in (ups[up], downs[down]):
            chosen[place] = option
        room -= int(size[up, down])


def _moves(
    chosen: list[Option], allowed: list[list[Option]], by: int
) -> list[tuple[float, int, int, Option]]:
    """For every operator, its next option up or down: seconds saved, bytes more, which, what."""
    moves = []
    for place, (now, each) in enumerate(zip(chosen, allowed, strict=True)):
        at = each.index(now) + by
        if 0 <= at < len(each):
            moves.append((now.seconds - each[at].seconds, each[at].memory - now.memory, place, each[at]))
    return moves


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
    bundles = _bundles(options)
    picks = np.zeros((len(bundles), len(times)), dtype=np.uint8)
    for row, (each, places) in enumerate(bundles):
        times = _add(times, picks[row], each, _sizes(each, len(places), unit), len(places))
    chosen = [each[0] for each in options]
    width = int(np.argmin(times))
    for row in range(len(bundles) - 1, -1, -1):
        each, places = bundles[row]
        pick = int(picks[row, width])
        width -= _sizes(each, len(places), unit)[pick]
        for place in places:
            chosen[place] = each[pick]
    return measured(chosen)


def _bundles(options: list[list[Option]]) -> list[tuple[list[Option], list[int]]]:
    """Undecided operators, identical ones with two options in bundles of 1, 2, 4, ...: any number of them
    is the sum of some bundles, so that a few rows of the table stand for hundreds of layers."""
    alike: dict[tuple[Option, ...], list[int]] = {}
    for place, each in enumerate(options):
        if len(each) > 1:
            alike.setdefault(tuple(each), []).append(place)
    made = []
    for kind, places in alike.items():
        size = 1
        while places:
            taken, places = places[:size], places[size:]
            made.append((list(kind), taken))
            size *= 2 if len(kind) == 2 else 1
    return made


def _sizes(each: Sequence[Option], count: int, unit: int) -> list[int]:
    return [-(-count * (option.memory - each[0].memory) // unit) for option in each]


def _add(
    times: np.ndarray, picks: np.ndarray, each: Sequence[Option], sizes: list[int], count: int
) -> np.ndarray:
    """One more bundle, in a new table: one that is changed in place would take an operator twice."""
    best = times + count * each[0].seconds
    for pick, size in enumerate(sizes):
        if pick and size < len(times):
            tried = times[: len(times) - size] + count * each[pick].seconds
            better = tried < best[size:]
            best[size:][better] = tried[better]
            picks[size:][better] = pick
    return best
