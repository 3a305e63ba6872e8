"""Pipes that transfers share: a direction of a link has a bandwidth, and remembers what of it is taken when.

Transfers that are asked for together share what is left, but not evenly, since TCP's flows do not within a
fraction of a second: of three that begin at once on a link of a testbed, the first ended at 0.58 of the time
that all took, the second at 0.85 (means of eight rounds; shared evenly, all would end at 1). Here those that
share the same pipes have weights in their order, 3 : 2 : 1 for three, so they end at 0.67, 0.83 and 1. Nobody
could have more but at the expense of somebody who has less for its weight (max-min fairness). So workers
alike do not stay in step on a link; they come to use it one after another.

Those that were asked for before keep what they were given, so it is known at once when a transfer ends, and
no event has to be moved later. The price: of two that are asked for one after the other, for the same time,
the first goes first, where on a testbed it loses a part to the second. Both are through by the same time
as if they had shared, since no pipe is idle while somebody waits for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

TINY = 1e-9
"""Of a bandwidth: what is left over by rounding."""
MANY, GRAIN = 64, 0.01
"""A pipe that remembers more stretches of time than so many joins those that differ by so little of its
bandwidth. Else thousands of transfers at once, none of which it slows down, would each be looked through."""
MODEL = 2
"""Goes up when the same transfers take other times: results that were kept before are made again."""
WEIGHTS = 8
"""So many different ones at most: thousands of transfers that begin together are as many groups."""


class Pipe:
    """One direction of a link."""

    __slots__ = ("_taken", "_times", "rate")

    def __init__(self, rate: float | None) -> None:
        """Bytes per second; None: without limit."""
        self.rate = inf if rate is None else rate
        self._times: list[float] = []
        self._taken: list[float] = []
        """From the time of the same index to the next; after the last, nothing."""

    def idle_from(self, start: float) -> bool:
        """Whether nothing is taken from then on."""
        return not self._times or self._times[-1] <= start

    def left(self, at: float) -> tuple[float, float]:
        """What is left of it at a time, and until when."""
        if self.rate == inf:
            return inf, inf
        index = bisect_right(self._times, at)
        taken = self._taken[index - 1] if index else 0.0
        free = self.rate - taken
        until = self._times[index] if index < len(self._times) else inf
        return (free if free > TINY * self.rate else 0.0), until

    def least_left(self, start: float, end: float) -> float:
        """What is left of it from then to then, at any time."""
        first, last = bisect_right(self._times, start), bisect_left(self._times, end)
        return self.rate - max(self._taken[max(0, first - 1) : last], default=0.0)

    def take(self, start: float, end: float, rate: float) -> None:
        """So much is taken from then to then."""
        if end <= start or self.rate == inf:
            return
        first, last = self._cut(start), self._cut(end)
        for index in range(first, last):
            self._taken[index] += rate
        for index in range(min(last, len(self._times) - 1), max(first, 1) - 1, -1):
            self._merge(index)

    def forget(self, before: float) -> None:
        """What was before then is of no use any more."""
        index = bisect_right(self._times, before) - 1
        if index > 0:
            del self._times[:index], self._taken[:index]

    def _merge(self, index: int) -> None:
        """Let two stretches be one if they are nearly the same. All bytes stay on record."""
        times, taken = self._times, self._taken
        last = index == len(times) - 1
        grain = TINY if last or len(times) <= MANY else GRAIN
        if abs(taken[index] - taken[index - 1]) > grain * self.rate:
            return
        if not last:
            before, after = times[index] - times[index - 1], times[index + 1] - times[index]
            taken[index - 1] = (before * taken[index - 1] + after * taken[index]) / (before + after)
        del times[index], taken[index]

    def _cut(self, at: float) -> int:
        index = bisect_left(self._times, at)
        if index == len(self._times) or self._times[index] != at:
            self._times.insert(index, at)
            self._taken.insert(index, self._taken[index - 1] if index else 0.0)
        return index


class Transfer(NamedTuple):
    """Bytes, and the pipes they go through."""

    route: tuple[Pipe, ...]
    size_bytes: float


class _Alike:
    """Transfers of one size and weight that share the same pipes: they have one rate at all times, and end
    together."""

    def __init__(
        self, shared: tuple[Pipe, ...], own_rate: float, size_bytes: float, weight: float, numbers: list[int]
    ) -> None:
        self.shared, self.own_rate, self.left = shared, own_rate, size_bytes
        self.weight, self.numbers = weight, numbers
        self.rate = 0.0
        self.course: list[tuple[float, float, float]] = []
        """From when to when it had which rate."""

    def take_own(self, transfers: Sequence[Transfer]) -> None:
        """What each of them took of pipes that no other crosses."""
        own = (pipe for number in self.numbers for pipe in transfers[number].route if pipe not in self.shared)
        for pipe in own:
            for begin, end, rate in self.course:
                pipe.take(begin, end, rate)


def carry(transfers: Sequence[Transfer], start: float) -> list[float]:
    """Let transfers begin together; when each of them ends."""
    if len(transfers) == 1:
        return [_carry_one(*transfers[0], start)]
    ends = [start] * len(transfers)
    alike = _sorted_out(transfers, start)
    going, now = [each for each in alike if each.left > 0 and (each.shared or each.own_rate < inf)], start
    while going:
        lefts = {pipe: pipe.left(now) for each in going for pipe in each.shared}
        _set_rates(going, {pipe: free for pipe, (free, _) in lefts.items()})
        done = [now + each.left / each.rate if each.rate else inf for each in going]
        until = min([*done, *(end for _, end in lefts.values())])
        _go_on(going, now, until)
        for each, end in zip(going, done, strict=True):
            for number in each.numbers if end <= until else ():
                ends[number] = until
        going, now = [each for each, end in zip(going, done, strict=True) if end > until], until
    for each in alike:
        each.take_own(transfers)
    return ends


def _carry_one(route: tuple[Pipe, ...], size_bytes: float, now: float) -> float:
    """The same for one that is alone."""
    while size_bytes > 0:
        lefts = [pipe.left(now) for pipe in route]
        rate, until = min([inf, *(free for free, _ in lefts)]), min([inf, *(end for _, end in lefts)])
        if rate == inf:
            break
        done = now + size_bytes / rate if rate else inf
        if done > until and rate and all(pipe.least_left(now, done) >= rate for pipe in route):
            until = done  # others come and go meanwhile, but none of them matters
        until = min(until, done)
        for pipe in route if rate else ():
            pipe.take(now, until, rate)
        size_bytes, now = (size_bytes - rate * (until - now) if done > until else 0.0), until
    return now


def _sorted_out(transfers: Sequence[Transfer], start: float) -> list[_Alike]:
    """Transfers by what they share with others. A pipe that one alone crosses only limits that one."""
    crossed = Counter(pipe for each in transfers for pipe in each.route)
    found: dict[tuple[tuple[Pipe, ...], float, float], list[int]] = {}
    for number, (route, size) in enumerate(transfers):
        own = {pipe for pipe in route if crossed[pipe] == 1 and pipe.idle_from(start)}
        shared = tuple(pipe for pipe in route if pipe not in own and pipe.rate < inf)
        key = shared, min((pipe.rate for pipe in own), default=inf), float(size)
        found.setdefault(key, []).append(number)
    return [
        _Alike(*key, weight, part) for key, numbers in found.items() for weight, part in _weighed(numbers)
    ]


def _weighed(numbers: list[int]) -> list[tuple[float, list[int]]]:
    """The first have most, the last least, and on average they have 1."""
    groups = min(len(numbers), WEIGHTS)
    ends = [len(numbers) * group // groups for group in range(groups + 1)]
    weights = [2 * (groups - group) / (groups + 1) for group in range(groups)]
    return [(weight, numbers[a:b]) for weight, (a, b) in zip(weights, pairwise(ends), strict=True)]


def _set_rates(going: list[_Alike], free: dict[Pipe, float]) -> None:
    """Raise all rates together, in proportion to their weights; whoever meets a limit stays there."""
    rising = list(going)
    while rising:
        crossing = dict.fromkeys((pipe for each in rising for pipe in each.shared), 0.0)
        for each in rising:
            for pipe in each.shared:
                crossing[pipe] += each.weight * len(each.numbers)
        levels = {
            id(each): min([each.own_rate / each.weight, *(free[x] / crossing[x] for x in each.shared)])
            for each in rising
        }
        level = min(levels.values())
        for each in [each for each in rising if levels[id(each)] <= level * (1 + TINY)]:
            each.rate = level * each.weight
            rising.remove(each)
            for pipe in each.shared:
                free[pipe] = max(0.0, free[pipe] - each.rate * len(each.numbers))


def _go_on(going: list[_Alike], now: float, until: float) -> None:
    for each in going:
        each.left -= each.rate * (until - now)
        each.course.append((now, until, each.rate))
        for pipe in each.shared:
            pipe.take(now, until, each.rate * len(each.numbers))
