"""Elastic Bulk Synchronous Parallel: a barrier for all workers, placed where the least waiting is expected.

Paper: Zhao, Papagelis, An, Chen, Liu, Hu, "Elastic Bulk Synchronous Parallel Model for Distributed
Deep Learning", IEEE ICDM 2019, arXiv 2001.01347; with "ZipLine", Machine Learning 2021.

Promise: all start each superstep together on the same weights; within it each makes at most `lookahead`
iterations once they are predicted.

When: iteration times differ but can be predicted, and all workers should regularly start from the same
weights.

A superstep goes from barrier to barrier. In its monitored part all workers run freely until each has pushed
twice, which gives an interval without a barrier in it. Then the protocol predicts each worker's next
`lookahead` pushes, and ZipLine chooses one of them for each. A worker that has made its chosen push waits for
the others. Pushes are applied at once, except each worker's last one: these are applied together in one step.

Invariant: no worker starts a superstep before all active workers made their last push of the previous one; a
quota is at least 1 and at most `lookahead`. With lookahead=1 and monitor=off every superstep is one
iteration, and the decisions are BSP's.

Where we differ: the paper does not say what happens to pushes within a superstep, nor how a quota handles a
wrong prediction. Here quotas are counts, not deadlines, and `barrier_update` offers both readings. A push
that is already overdue is expected now. A worker that joins during a superstep waits after its first push.
`carry_over` and `off` predict at the barrier itself. The first superstep, and any superstep that begins with
an unknown interval, is one iteration for every worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks
from paceline.protocols.rules.zipline import SEARCHES


@dataclass(slots=True)
class ElasticBSP:
    lockstep: ClassVar[bool] = False

    lookahead: int = 15
    """Number of pushes predicted for each worker, and the largest possible quota (R in the paper)."""
    monitor: Literal["free", "carry_over", "off"] = "free"
    """Which intervals are used: of two free pushes in each superstep, of the last run (carry_over), or with
    waits (off)."""
    barrier_update: Literal["aggregate", "immediate"] = "aggregate"
    """Whether the last gradients of a superstep are applied together in one step, or one by one on
    arrival."""
    search: Literal["zipline", "grid", "full_grid"] = "zipline"
    """How quotas are chosen: the exact optimum (zipline) or the paper's heuristics (grid, full_grid)."""
    max_superstep: int = 0
    """Most pushes of one worker in a superstep, including monitored ones. 0: no limit."""

    since: dict[int, int] = field(init=False, default_factory=dict)
    stops: dict[int, int] = field(init=False, default_factory=dict)
    predicted: bool = field(init=False, default=False)
    unseen: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ConfigError(
                f"ElasticBSP lookahead must be >= 1, got {self.lookahead}. The paper uses 15 to 240."
            )
        least = 2 if self.monitor == "free" else 1
        if self.max_superstep != 0 and self.max_superstep < least:
            raise ConfigError(
                f"ElasticBSP max_superstep must be >= {least} with monitor={self.monitor}, "
                f"got {self.max_superstep}. Use 0 for no limit."
            )

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if clocks.left is not None:
            self._forget(clocks.left)
        if pushed is not None:
            self.since[pushed] = self.since.get(pushed, 0) + 1
        if not self.predicted and self.monitor == "free" and self._all_pushed_twice(clocks, pushed):
            self.stops, self.predicted = self._predict(clocks), True
        if pushed is not None and not self._is_last(pushed):
            return Verdict(release=(pushed,))
        fate = Fate.HOLD if self.barrier_update == "aggregate" else Fate.APPLY
        if clocks.waiting_count < len(clocks.active):
            return Verdict(fate=fate)
        self._begin_superstep(clocks)
        return Verdict(fate=fate, flush=Flush.MEAN, release=clocks.waiting())

    def _forget(self, worker: int) -> None:
        self.since.pop(worker, None)
        self.stops.pop(worker, None)

    def _is_last(self, worker: int) -> bool:
        made = self.since[worker]
        if self.max_superstep and made >= self.max_superstep:
            return True
        if not self.predicted and self.monitor == "free":
            return False
        return made >= self.stops.get(worker, 1)

    def _begin_superstep(self, clocks: Clocks) -> None:
        self.since, self.predicted = {}, False
        self.stops = {} if self.monitor == "free" else self._predict(clocks)

    def _predict(self, clocks: Clocks) -> dict[int, int]:
        """The push, counted from the barrier, after which each worker is to wait."""
        rows = [self._ends(clocks, worker) for worker in clocks.active]
        if not all(rows):
            return {}
        quotas = zip(clocks.active, SEARCHES[self.search](rows), strict=True)
        return {worker: self.since.get(worker, 0) + quota for worker, quota in quotas}

    def _ends(self, clocks: Clocks, worker: int) -> list[float]:
        """When the worker's next pushes are expected; nothing if its interval is unknown."""
        last, interval = clocks.last_push_s(worker), clocks.interval_s(worker)
        if self.monitor == "carry_over":
            last, interval = clocks.now, clocks.run_s(worker)
        if last is None or interval is None:
            return []
        first = max(last + interval, clocks.now)
        return [first + i * interval for i in range(self.lookahead)]

    def _all_pushed_twice(self, clocks: Clocks, pushed: int | None) -> bool:
        """Whether all workers have an interval of this superstep. A worker without one is checked again when
        it pushes."""
        if pushed is not None and self.unseen and pushed != self.unseen[-1]:
            return False
        while self.unseen:
            if self._is_unseen(clocks, self.unseen[-1]):
                return False
            self.unseen.pop()
        self.unseen = [worker for worker in clocks.active if self._is_unseen(clocks, worker)]
        return not self.unseen

    def _is_unseen(self, clocks: Clocks, worker: int) -> bool:
        known = self.since.get(worker, 0) >= 2 and clocks.interval_s(worker) is not None
        return not known and worker in clocks.active
