"""Work in portions of each worker's own size: what `--balance` does, in a timing-only simulation."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from paceline.errors import ConfigError
from paceline.protocols.rules.balance import Balancer, told
from paceline.sim.compute import require


def check_balance(batch: int, equal_shards: bool) -> None:
    """Refuse what cannot be balanced."""
    if equal_shards:
        raise ConfigError(
            "--balance gives a slow worker less work, but --shards equal gives every worker the same. Use "
            "--shards shared, or leave --balance out."
        )
    remedy = "Use --batch 32, say: the samples behind one push."
    require(batch > 1, "--balance splits batches by speed, so batch must be > 1", batch, remedy)


class BalancedWork:
    """Samples in order, to whoever is ready, as many at a time as a worker is worth.

    Positions are samples here. What a lost worker did not finish is cut anew.
    """

    measures = True

    def __init__(self, total: int, workers: int, batch: int, tell: Callable[[str], None]) -> None:
        """`total`: pushes of the batch's size; `tell` takes a note whenever sizes change."""
        self.total = total
        self.samples = [batch] * workers
        self._balancer = Balancer(batch)
        self._tell = tell
        self._told = 0
        self._left = [(0, total * batch)]

    @property
    def undone(self) -> int:
        """Pushes that wait for a worker, at the usual size."""
        left = sum(end - first for first, end in self._left)
        return -(-left // self._balancer.batch)

    def has_some_for(self, worker: int) -> bool:
        return bool(self._left)

    def draw(self, worker: int) -> int | None:
        if not self._left:
            return None
        self._balancer.join(worker)
        first, end = heappop(self._left)
        count = self.samples[worker] = min(self._balancer.size(worker), end - first)
        if first + count < end:
            heappush(self._left, (first + count, end))
        return first

    def give_back(self, worker: int, position: int) -> None:
        heappush(self._left, (position, position + self.samples[worker]))

    def pushed(self, worker: int, samples: int, compute_s: float) -> None:
        balancer = self._balancer
        balancer.measured(worker, samples, compute_s)
        if balancer.revision != self._told:
            self._told = balancer.revision
            self._tell(told(balancer.sizes))

    def leave(self, worker: int) -> None:
        self._balancer.leave(worker)
