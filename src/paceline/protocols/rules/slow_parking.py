"""Parks slow workers during a run so that the learning rate stays stable (`--park-slow`).

Paper: Yu, Chen, Poor, "Distributed Stochastic Gradient Descent with Staleness" (SDDE), arXiv 2406.11159. The
load of M active workers is x = step x curvature x (M - 1/2), and any delay law is stable below x = pi/2. Here
the slowest workers are parked until x is at most 0.7 of that. A parked worker is set aside at its next push,
sleeps, and is called back when there is room again.

Workers are ranked again after every window of 200 pushes (or one per worker, if there are more) by the mean
time from release to push. A parked worker counts as 5 % slower than it was, so that equal workers do not take
turns. Workers are called back when x would be within the bound even with a 5 % longer step, or at once when
others have died or left. The lead (rank 0, if present) and the last active worker are never parked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf, pi

from paceline.errors import ConfigError
from paceline.protocols.core.clocks import Clocks

CRITICAL = pi / 2
SAFETY = 0.7
HYSTERESIS = 1.05
WINDOW = 200
SUITED = ("asp", "dssp", "ssp")
"""Protocols that let a worker be set aside at any push, and hold no gradients back."""


class SlowParking:
    """Decides which workers are set aside and called back: O(1) per push, O(n log n) per window of n
    pushes."""

    def __init__(self, curvature: float, share: Callable[[int], float], rate: float = 0.0) -> None:
        """`share`: how much of a step a push counts, given the number of active workers; `rate`: the learning
        rate, which may change."""
        self._curvature, self._share = curvature, share
        self.rate = rate
        self.lead = 0
        """The worker that prints and evaluates."""
        self.target = 0
        """How many workers should be active. 0: all."""
        self._slow: set[int] = set()
        """Workers beyond the target, parked already or not."""
        self._faster: set[int] = set()
        """Parked workers that should be active: each replaces a slower one."""
        self._away: set[int] = set()
        """Workers that are evaluating and will be back."""
        self._means: dict[int, float] = {}
        self._window: dict[int, tuple[int, float]] = {}
        self._cycles = 0

    def load(self, active: int) -> float:
        """The load x of this number of workers."""
        return self.rate * self._share(active) * self._curvature * (active - 0.5)

    def most(self, workers: int, longer: float = 1.0) -> int:
        """The largest number of workers within the bound, with a `longer` step; at least one."""
        low, high = 1, max(workers, 1)
        while low < high:
            middle = (low + high + 1) // 2
            within = longer * self.load(middle) <= SAFETY * CRITICAL
            low, high = (middle, high) if within else (low, middle - 1)
        return low

    # -- what happens -----------------------------------------------------------------------------

    def joined(self, worker: int) -> None:
        """It takes part, perhaps again."""
        self._away.discard(worker)

    def left(self, clocks: Clocks, worker: int, away: bool) -> None:
        """It is gone, or only away."""
        if away:
            self._away.add(worker)
        else:
            self._away.discard(worker)
            self._slow.discard(worker)
            self._faster.discard(worker)
            self._means.pop(worker, None)
            self._window.pop(worker, None)
            if clocks.benched and self._count(clocks) >= self.target:  # else there is room for a parked one
                self._sort(clocks)

    def pushed(self, clocks: Clocks, worker: int) -> None:
        """Count one more cycle; after a window of them, rank the workers again."""
        count, seconds = self._window.get(worker, (0, 0.0))
        self._window[worker] = count + 1, seconds + (clocks.run_s(worker) or 0.0)
        self._cycles += 1
        if self._cycles >= max(WINDOW, len(clocks.active)):
            self._look(clocks)

    def _look(self, clocks: Clocks) -> None:
        self._means |= {w: seconds / count for w, (count, seconds) in self._window.items()}
        self._window, self._cycles = {}, 0
        present = len(clocks.active) + len(clocks.benched)
        limit, roomy = self.most(present), self.most(present, HYSTERESIS)
        now = min(self.target or inf, len(clocks.active) + len(self._away))
        self.target = limit if now > limit else roomy if now < roomy else int(now)
        self._sort(clocks)

    def _sort(self, clocks: Clocks) -> None:
        """Find the workers beyond the target."""
        present = [*clocks.active, *clocks.benched]
        order = sorted(
            present, key=lambda worker: (worker != self.lead, self._cycle_s(clocks, worker), worker)
        )
        self._slow = set(order[self.target :])
        self._faster = set(clocks.benched).difference(self._slow)

    def _cycle_s(self, clocks: Clocks, worker: int) -> float:
        handicap = HYSTERESIS if worker in clocks.benched else 1.0
        return self._means.get(worker, 0.0) * handicap

    # -- what follows -----------------------------------------------------------------------------

    def parks(self, clocks: Clocks, worker: int) -> bool:
        """Whether to set aside a worker that has just pushed: if too many are active, or for a faster one."""
        if worker not in self._slow or worker == self.lead or len(clocks.active) < 2:
            return False
        return self._count(clocks) > self.target or bool(self._faster)

    def called_back(self, clocks: Clocks) -> tuple[int, ...]:
        """Parked workers that there is room for, fastest first; all of them while all others are away."""
        room = self.target - self._count(clocks)
        if not clocks.benched or (room <= 0 and clocks.active):
            return ()
        order = sorted(clocks.benched, key=lambda w: (w in self._slow, self._cycle_s(clocks, w), w))
        called = order[:room] if room > 0 else order
        self._faster.difference_update(called)
        if room > 0:
            self._slow.difference_update(called)
        return tuple(called)

    def _count(self, clocks: Clocks) -> int:
        return len(clocks.active) + len(self._away)

    def told(self, parked: int | None, back: Iterable[int]) -> str:
        """A message for the user; empty if nothing happened."""
        said = [f"called back, as there is room for {self.target}: rank {rank}" for rank in back]
        if parked is not None:
            load = f"{self.target} active workers are what a load of {SAFETY:g} x pi/2 allows"
            said.append(f"parked: rank {parked}, {self._means.get(parked, 0.0):.3g} s per push; {load}")
        return "; ".join(said)


def check(curvature: float | None, name: str, *, paced: bool) -> None:
    """Refuse runs in which parking cannot work."""
    if curvature is not None and not (paced and name in SUITED):
        raise ConfigError(
            f"--park-slow sets workers aside while others go on, which protocol {name!r} does not allow. "
            f"Use {', '.join(SUITED[:-1])} or {SUITED[-1]}."
        )
