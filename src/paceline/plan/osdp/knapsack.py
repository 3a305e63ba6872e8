"""The exact search for one batch size: a multiple-choice knapsack over memory, for every height of the surge.

Memory is the sum of what operators hold plus the largest surge. The largest is handled exactly: for every
possible height, only options below it take part, and the sum has the rest of the limit.

Three things make it fast without giving up exactness. A height whose linear relaxation cannot beat the
best plan found is skipped. Within a height, an option is left out if the relaxation with that option
cannot beat it either (its price in Lagrange's sense is too high): mostly a few operators remain open.
Of those few, operator by operator, the choices are kept that no other beats in both time and memory and
that can still beat the best plan.

Memory is counted in bytes. The published code counts in MiB: a small model then loses much of its limit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from paceline.plan.osdp.options import Option

MOST_KEPT = 1 << 15
"""Partial choices kept at a time. Of more than these, the smallest and the fastest of each stretch of memory
stay: the plan still fits, and is no longer sure to be the fastest."""
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


def solve(options: Options, limit: int, tolerance: float | None = None) -> Solution | None:
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
        best = _faster(best, _search(_open(allowed, relaxed, best.seconds), room, relaxed.price, best, slack))
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


class _Bundle(NamedTuple):
    """Operators that are decided together, and what each of their options adds to the first one."""

    options: list[Option]
    places: list[int]

    @property
    def memory(self) -> list[int]:
        """Bytes."""
        return [len(self.places) * (option.memory - self.options[0].memory) for option in self.options]

    @property
    def seconds(self) -> list[float]:
        """Mostly below 0."""
        return [len(self.places) * (option.seconds - self.options[0].seconds) for option in self.options]

    def least(self, price: float) -> float:
        """The lowest time with memory at this price."""
        return min(t + price * m for t, m in zip(self.seconds, self.memory, strict=True))


class _Kept(NamedTuple):
    """Partial choices in the order of their memory: each one's sums, and how it was reached."""

    memory: np.ndarray
    seconds: np.ndarray
    before: np.ndarray
    """Its place among the partial choices before."""
    pick: np.ndarray
    """Which option of the last bundle it takes."""

    def at(self, places: np.ndarray) -> _Kept:
        """Some of them."""
        return _Kept(*(column[places] for column in self))


def _search(
    options: list[list[Option]], room: int, price: float, best: Solution, slack: float
) -> Solution | None:
    """Of all choices within the room the fastest, if it is faster than the best one by the slack."""
    if not all(options):
        return None
    room -= sum(each[0].memory for each in options)
    if room < 0:
        return None
    wanted = sum(each[-1].memory - each[0].memory for each in options)
    if wanted <= room:
        return measured([each[-1] for each in options])
    bundles = _bundles(options)
    most = best.seconds * slack - sum(each[0].seconds for each in options) + price * room
    rest = sum(bundle.least(price) for bundle in bundles)
    kept = _Kept(np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int32), np.zeros(1, np.uint8))
    steps: list[_Kept] = []
    for bundle in bundles:
        rest -= bundle.least(price)
        kept = _added(kept, bundle, room, price, most - rest)
        if not len(kept.memory):
            return None
        steps.append(kept)
    chosen = [each[0] for each in options]
    at = int(np.argmin(kept.seconds))
    for bundle, step in zip(reversed(bundles), reversed(steps), strict=True):
        for place in bundle.places:
            chosen[place] = bundle.options[int(step.pick[at])]
        at = int(step.before[at])
    return measured(chosen)


def _added(kept: _Kept, bundle: _Bundle, room: int, price: float, most: float) -> _Kept:
    """One more bundle. Left out is what does not fit, what another beats in time and memory, and what takes
    longer than `most` with its memory at the price."""
    count, ways = len(kept.memory), len(bundle.options)
    made = _Kept(
        np.concatenate([kept.memory + size for size in bundle.memory]),
        np.concatenate([kept.seconds + seconds for seconds in bundle.seconds]),
        np.tile(np.arange(count, dtype=np.int32), ways),
        np.repeat(np.arange(ways, dtype=np.uint8), count),
    )
    made = made.at(np.flatnonzero((made.memory <= room) & (made.seconds + price * made.memory <= most)))
    made = made.at(np.lexsort((made.seconds, made.memory)))
    fastest = np.minimum.accumulate(made.seconds)
    made = made.at(np.flatnonzero(made.seconds < np.concatenate([[np.inf], fastest[:-1]])))
    return made if len(made.memory) <= MOST_KEPT else _thinned(made, room)


def _thinned(kept: _Kept, room: int) -> _Kept:
    """The smallest and the fastest of each stretch of memory."""
    stretch = kept.memory // -(-(room + 1) // (MOST_KEPT // 2))
    ends = np.flatnonzero(np.diff(stretch, append=-1))
    return kept.at(np.unique(np.concatenate([[0], ends, ends[:-1] + 1])))


def _bundles(options: list[list[Option]]) -> list[_Bundle]:
    """Undecided operators, identical ones with two options in bundles of 1, 2, 4, ...: any number of them
    is the sum of some bundles, so that a few steps stand for hundreds of layers."""
    alike: dict[tuple[Option, ...], list[int]] = {}
    for place, each in enumerate(options):
        if len(each) > 1:
            alike.setdefault(tuple(each), []).append(place)
    made = []
    for kind, places in alike.items():
        size = 1
        while places:
            taken, places = places[:size], places[size:]
            made.append(_Bundle(list(kind), taken))
            size *= 2 if len(kind) == 2 else 1
    return made
