"""Figures over time in bounded memory, however long the run was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Point = tuple[float, float]
T = TypeVar("T")


class TimeBins:
    """Amounts in equal stretches of time. When time runs out of bins, two become one."""

    def __init__(self, bins: int = 256, width_s: float = 2.0**-10) -> None:
        self._sums = [0.0] * bins
        self._counts = [0.0] * bins
        self._width_s = width_s

    def add(self, t: float, value: float) -> None:
        """Count one value."""
        at = self._bin(t)
        self._sums[at] += value
        self._counts[at] += 1

    def spread(self, start: float, end: float, amount: float, values: int = 0) -> None:
        """Spread an amount evenly over a stretch of time, and the number of values it is the sum of."""
        start = min(start, end)
        last, width = self._bin(end), self._width_s
        for at in range(self._bin(start), last + 1):
            inside = min(end, (at + 1) * width) - max(start, at * width)
            share = max(0.0, inside) / (end - start) if end > start else 1.0
            self._sums[at] += amount * share
            self._counts[at] += values * share
        if not values:
            self._counts[last] += 1

    def means(self) -> list[Point]:
        """The mean value of each stretch that has one, at its middle."""
        filled = [(at, count) for at, count in enumerate(self._counts) if count]
        return [((at + 0.5) * self._width_s, self._sums[at] / count) for at, count in filled]

    def rates(self, until: float, most: int = 64) -> list[Point]:
        """Amount per second of each stretch up to `until`, in at most `most` of them.

        A rest that fills no stretch is left out: what was begun in it and not pushed would be missing.
        """
        if not any(self._counts):
            return []
        used = int(until / self._width_s)
        together = max(1, -(-used // most))
        width = together * self._width_s
        totals = [sum(self._sums[at : at + together]) for at in range(0, used - together + 1, together)]
        return [((at + 0.5) * width, total / width) for at, total in enumerate(totals)]

    def _bin(self, t: float) -> int:
        while t >= self._width_s * len(self._sums):
            self._halve()
        return int(max(0.0, t) / self._width_s)

    def _halve(self) -> None:
        empty = len(self._sums) // 2
        self._sums = [a + b for a, b in _pairs(self._sums)] + [0.0] * empty
        self._counts = [a + b for a, b in _pairs(self._counts)] + [0.0] * empty
        self._width_s *= 2


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most about `most` of the items, evenly chosen, the last always among them."""
    step = max(1, -(-len(items) // most))
    kept = list(items[::step])
    if items and kept[-1] is not items[-1]:
        kept.append(items[-1])
    return kept


def _pairs(values: Sequence[T]) -> list[tuple[T, T]]:
    return list(zip(values[::2], values[1::2], strict=True))
