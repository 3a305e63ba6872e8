"""Dynamic Stale Synchronous Parallel: a range of staleness instead of one threshold.

Paper: Zhao, An, Liu, Chen, "Dynamic Stale Synchronous Parallel Distributed Training for Deep
Learning", IEEE ICDCS 2019, arXiv 1908.11848.

Promise: gap at most `upper` with the bounded presets; chosen to wait least within the range.

When: slowness comes and goes and you do not know which bound to choose.

When the fastest worker passes `lower`, a controller uses the last two push times of this worker and of the
slowest. It predicts after how many extra iterations the worker would stop nearest to a push of the slowest,
and grants that number. The worker uses up its grant before `lower` is checked again.

Invariant: with the presets `bounded` and `bounded_eager` a released worker is at most `upper` iterations
ahead of the slowest, which is what the paper's Theorem 2 presupposes. `lower == upper` decides exactly as
SSP(lower), except with `figure2`: there a wait ends at the next push of the worker that was slowest, even if
another is still as slow. With two workers `figure2` equals SSP, too.

Where we differ: the printed algorithm answers a granted push twice, grants one iteration too many
and never enforces the upper bound; push times are recorded on every push, not only in the
controller. The presets name the possible readings:
  bounded        exact grants, wait until the gap is back to `lower`, hard upper bound (default)
  bounded_eager  as bounded, but the next push of the slowest ends a wait if the gap allows it
  figure2        exact grants, the next push of the slowest ends a wait, no bound (close to ASP)
  printed        one iteration more per grant, wait until `lower`, no bound
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.base import Verdict
from paceline.protocols.core.clocks import Clocks

Preset = Literal["bounded", "bounded_eager", "figure2", "printed"]


def best_grant(
    last_p: float, interval_p: float, next_s: float, interval_s: float, most: int, limit: int
) -> int:
    """Algorithm 2: how many extra iterations bring p's stop nearest to a push of the slowest.

    `next_s` is the next expected push of the slowest, then one each `interval_s`, `most` + 1 in all. Ties go
    to the fewest iterations. O(most): each push of the slowest is compared with the nearest stops of p before
    and after it.
    """
    best, distance = 0, float("inf")
    for k in range(most + 1):
        ahead = next_s + k * interval_s - last_p
        around = floor(ahead / interval_p) if interval_p > 0 else 0
        for r in (max(0, min(limit, around)), max(0, min(limit, around + 1))):
            miss = abs(ahead - r * interval_p)
            if (miss, r) < (distance, best):
                best, distance = r, miss
    return best


@dataclass(slots=True)
class DSSP:
    lockstep: ClassVar[bool] = False

    lower: int = 3
    """Iterations a worker may always be ahead of the slowest (s_L in the paper)."""
    upper: int = 15
    """Most iterations a worker may be ahead when it has a grant (s_U = s_L + r_max in the paper)."""
    preset: Preset = "bounded"
    """How to read the paper's algorithm: bounded, bounded_eager, figure2 or printed."""

    grants: dict[int, int] = field(init=False, default_factory=dict)
    waits_for: dict[int, int] = field(init=False, default_factory=dict)
    awaited_by: dict[int, list[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.lower <= self.upper:
            raise ConfigError(
                f"DSSP needs 0 <= lower <= upper, got lower={self.lower}, upper={self.upper}. "
                "Use lower == upper for SSP with that staleness."
            )
        if self.preset not in ("bounded", "bounded_eager", "figure2", "printed"):
            raise ConfigError(
                f"DSSP has no preset {self.preset!r}. Use bounded, bounded_eager, figure2 or printed."
            )

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if clocks.left is not None:
            self._forget(clocks, clocks.left)
        ok = () if pushed is None else self._answer(clocks, pushed)
        freed = clocks.waiting(up_to=clocks.slowest + self.lower)
        if not ok or ok == freed:
            return Verdict(release=freed)
        return Verdict(release=tuple(dict.fromkeys((*freed, *ok))))

    def _answer(self, clocks: Clocks, pushed: int) -> tuple[int, ...]:
        ok: tuple[int, ...] = ()
        if pushed in self.awaited_by:
            ok = tuple(w for w in self._waited_for(clocks, pushed) if self._wait_over(clocks, w))
        if self._may_run(clocks, pushed):
            return (*ok, pushed)
        if self.preset in ("bounded_eager", "figure2"):
            self._wait_for_laggard(clocks, pushed)
        return ok

    def _may_run(self, clocks: Clocks, worker: int) -> bool:
        gap, granted = clocks.gap(worker), self.grants.get(worker)
        if granted:
            if gap <= self.upper or not self._bounded:
                self.grants[worker] = granted - 1
                return True
            self.grants[worker] = 0
        if gap <= self.lower:
            return True
        if clocks.slowest + gap < clocks.fastest:
            return False
        granted = self._controller(clocks, worker)
        if granted:
            self.grants[worker] = granted if self.preset == "printed" else granted - 1
        return granted > 0

    def _controller(self, clocks: Clocks, worker: int) -> int:
        slow = clocks.laggard()
        last_p, last_s = clocks.last_push_s(worker), clocks.last_push_s(slow)
        interval_p, interval_s = clocks.interval_s(worker), clocks.interval_s(slow)
        if last_p is None or last_s is None or interval_p is None or interval_s is None:
            return 0
        most = limit = self.upper - self.lower
        if self._bounded:
            limit = max(0, min(most, self.upper - clocks.gap(worker) + 1))
        return best_grant(last_p, interval_p, last_s + interval_s, interval_s, most, limit)

    def _wait_for_laggard(self, clocks: Clocks, worker: int) -> None:
        slow = self.waits_for[worker] = clocks.laggard()
        self.awaited_by.setdefault(slow, []).append(worker)

    def _waited_for(self, clocks: Clocks, slow: int) -> list[int]:
        """Workers that still wait for this worker's push. An entry may remain after its wait ended in another
        way."""
        if slow not in self.awaited_by:
            return []
        entries = dict.fromkeys(self.awaited_by.pop(slow))
        return [w for w in entries if self.waits_for.get(w) == slow and clocks.is_waiting(w)]

    def _wait_over(self, clocks: Clocks, worker: int) -> bool:
        over = not self._bounded or clocks.gap(worker) <= self.upper
        if not over:
            self._wait_for_laggard(clocks, worker)
        return over

    def _forget(self, clocks: Clocks, gone: int) -> None:
        self.grants.pop(gone, None)
        for worker in self._waited_for(clocks, gone):
            self._wait_for_laggard(clocks, worker)

    @property
    def _bounded(self) -> bool:
        return self.preset in ("bounded", "bounded_eager")
