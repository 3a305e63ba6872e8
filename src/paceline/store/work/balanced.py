"""The work of a balanced run: as many positions at a time as a worker is worth.

There are no fixed batches here. What is left of an epoch is a row of intervals, and a draw cuts the
worker's batch off the first of them; what comes back from a dead worker joins the row again. So every
position is still used exactly once per epoch, however sizes change and whoever dies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from paceline.errors import ConfigError
from paceline.protocols.rules.balance import Balancer
from paceline.store.work.budget import Batch, Budget, Source, place

NO_POSITIONS = (
    "--balance gives every worker a batch of its own size, cut from the positions of the loader's sampler, "
    "but {what}. {remedy}, or leave --balance out."
)


class BalancedBudget(Budget):
    """Dispenses what its balancer says."""

    def __init__(self, source: Source, workers: int, balancer: Balancer) -> None:
        super().__init__(source, workers)
        self._balancer = balancer

    def draw(self, worker: int) -> Batch:
        """The worker's next batch, from the first work that is left; an epoch's last one may be short."""
        if not self._returned:
            self._returned.append(Batch(self._opened, 0, self.source.samples or 0))
            self._opened += 1
        batch, rest = self._returned.popleft().split(self._balancer.size(worker))
        if rest.count:
            self._returned.appendleft(rest)
        self._drawn.setdefault(worker, []).append(batch)
        return batch

    def state(self, unapplied: Iterable[Batch] = ()) -> dict[str, Any]:
        """Everything needed to go on, measured speeds included."""
        return super().state(unapplied) | {"pace": self._balancer.state()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; one of a run without balance knows no speeds."""
        super().load(state)
        self._balancer.load(state.get("pace", {}))

    def _in_order(self, work: Iterable[Batch]) -> deque[Batch]:
        """Intervals in order, those that touch made one."""
        row = deque[Batch]()
        for batch in sorted(work, key=place):
            if row and row[-1].epoch == batch.epoch and row[-1].end == batch.first:
                batch = Batch(batch.epoch, row[-1].first, row.pop().count + batch.count)
            row.append(batch)
        return row


def check_divisible(source: Source | None) -> Source:
    """A loader whose batches may be of any size: balance needs one."""
    if source is None:
        what = "this run has no prepared loader, or one of an iterable dataset, which has no positions"
        raise ConfigError(NO_POSITIONS.format(what=what, remedy="Prepare a loader of a map-style dataset"))
    if source.whole:
        what = "this loader has a batch sampler of its own, which makes the batches itself"
        raise ConfigError(NO_POSITIONS.format(what=what, remedy="Give the loader a batch_size and a sampler"))
    return source
