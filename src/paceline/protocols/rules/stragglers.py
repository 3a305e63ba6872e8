"""Finds workers that have become slow, from their speeds in several windows in a row. `sync_switch` uses it.

A worker is *suspect* in a window when its speed is at most one standard deviation below the mean,
and at least the share `slower` below it: without the second, the slowest of equal workers always
would be. It is a *straggler* after `consecutive` suspect windows in a row, and has recovered after
as many that are not.

"At most", not "below": of two workers the slower one is exactly one deviation below the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf, sqrt
from statistics import fmean

import msgspec

_ROUNDING = 1e-9


class Stragglers(msgspec.Struct):
    """Times pushes, and compares speeds when a window is full."""

    consecutive: int
    slower: float
    marks: dict[int, int] = {}
    """Suspect windows in a row; of a straggler the windows it still has to be fast for, negative."""
    seconds: dict[int, float] = {}
    pushes: dict[int, int] = {}
    count: int = 0
    """Pushes in this window."""

    def timed(self, worker: int, seconds: float) -> None:
        """A push took this long."""
        self.seconds[worker] = self.seconds.get(worker, 0.0) + seconds
        self.pushes[worker] = self.pushes.get(worker, 0) + 1
        self.count += 1

    def look(self, active: Collection[int]) -> list[int]:
        """Close the window. The stragglers among the active, slowest first."""
        speeds = {w: n / max(self.seconds[w], 1e-9) for w, n in self.pushes.items() if w in active}
        self.begin_window()
        slow = suspects(speeds, self.slower)
        marks = {w: mark for w, mark in self.marks.items() if w in active}
        marks |= {w: self._marked(marks.get(w, 0), w in slow) for w in speeds}
        self.marks = {w: mark for w, mark in marks.items() if mark}
        stragglers = (w for w, mark in self.marks.items() if mark < 0)
        return sorted(stragglers, key=lambda w: (speeds.get(w, -inf), w))

    def begin_window(self) -> None:
        """Forget the times of the window so far."""
        self.seconds, self.pushes, self.count = {}, {}, 0

    def _marked(self, mark: int, suspect: bool) -> int:
        if mark < 0:
            return -self.consecutive if suspect else mark + 1
        if not suspect:
            return 0
        return mark + 1 if mark + 1 < self.consecutive else -self.consecutive


def suspects(speeds: Mapping[int, float], slower: float) -> set[int]:
    """Workers whose speed is at least one standard deviation, and at least the share `slower`, below the
    mean."""
    if not speeds:
        return set()
    mean = fmean(speeds.values())
    deviation = sqrt(fmean((speed - mean) ** 2 for speed in speeds.values()))
    limit = min(mean - deviation, (1 - slower) * mean)
    return {worker for worker, speed in speeds.items() if speed <= limit * (1 + _ROUNDING)}
