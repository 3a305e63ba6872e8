"""Balance: every worker's batch in proportion to its measured speed.

If one worker is always slower, no waiting rule can keep all workers busy: in lockstep the others wait for the
slowest each round, and a bound on staleness only delays that. Giving the slow worker less work helps. Batch
sizes are set so that all workers take equally long. The sum of the sizes does not change, so a round of
lockstep is the same large batch as before.

The rule has no clock and knows no protocol: the caller reports how long pushes took, and the rule returns the
size of each worker's next batch. Sizes are right when all times are equal, even if part of a time does not
depend on the batch; measuring again then changes nothing.

Invariants: the sizes of all present workers add up to their number times the loader's batch size;
no worker gets less than 1; a worker without a measurement gets the loader's batch size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from types import MappingProxyType

MEASUREMENTS = 5
"""Pushes of every worker between two checks of the sizes. The median of their times counts."""
TOLERANCE = 0.1
"""Sizes stay as they are unless one is off by more than this share of it, and by more than a sample."""
MANY = 16
"""With up to this many workers a note lists every worker's size."""


class Balancer:
    """Chooses every worker's batch size."""

    def __init__(self, batch: int) -> None:
        """`batch`: the loader's batch size."""
        self.batch = batch
        self.revision = 0
        """How often the sizes have changed."""
        self._sizes: dict[int, int] = {}
        self._pace: dict[int, float] = {}  # seconds per sample on which the sizes rest
        self._recent: dict[int, deque[float]] = {}
        self._awaited: set[int] = set()  # who was not measured often enough since the last look

    @property
    def sizes(self) -> Mapping[int, int]:
        """The batch size of every present worker."""
        return MappingProxyType(self._sizes)

    def join(self, worker: int) -> None:
        """A worker takes part. One that has been there all the time keeps its size."""
        if worker not in self._sizes:
            self._sizes[worker] = self.batch
            self._recent[worker] = deque(maxlen=MEASUREMENTS)
            self._awaited.add(worker)
            self._settle()

    def leave(self, worker: int) -> None:
        """A worker is gone, and what was known of its speed with it."""
        if self._sizes.pop(worker, None) is not None:
            del self._recent[worker]
            self._awaited.discard(worker)
            self._pace.pop(worker, None)
            self._settle()

    def size(self, worker: int) -> int:
        """How many samples the worker's next batch has."""
        return self._sizes.get(worker, self.batch)

    def measured(self, worker: int, samples: int, compute_s: float) -> None:
        """A worker pushed. Invalid times and pushes without samples are ignored."""
        if worker not in self._sizes or samples <= 0 or not 0 < compute_s / samples < inf:
            return
        recent = self._recent[worker]
        recent.append(compute_s / samples)
        if len(recent) == MEASUREMENTS:
            self._awaited.discard(worker)
        if not self._awaited:
            self._look()

    def state(self) -> dict[str, float]:
        """The speeds the sizes rest on, for a checkpoint."""
        return {str(worker): pace for worker, pace in self._pace.items()}

    def load(self, state: Mapping[str, float]) -> None:
        """Begin with the speeds of a checkpoint."""
        self._pace = {int(worker): pace for worker, pace in state.items()}
        self._settle()

    def _look(self) -> None:
        """All workers were measured again: change the sizes if a share moves far enough."""
        pace = {worker: sorted(recent)[len(recent) // 2] for worker, recent in self._recent.items()}
        shares = self._shares(pace)
        if any(abs(shares[w] - size) > max(1.0, TOLERANCE * size) for w, size in self._sizes.items()):
            self._pace = pace
            self._settle()
        for recent in self._recent.values():
            recent.clear()
        self._awaited = set(self._sizes)

    def _settle(self) -> None:
        sizes = rounded(self._shares(self._pace), self.batch * len(self._sizes))
        if sizes != self._sizes:
            self._sizes = sizes
            self.revision += 1

    def _shares(self, pace: Mapping[int, float]) -> dict[int, float]:
        """Every worker's share before rounding. A worker without a measurement counts as average."""
        known = [worker for worker in self._sizes if worker in pace]
        least = min((pace[worker] for worker in known), default=1.0)
        split = in_proportion(self.batch * len(known), {w: least / pace[w] for w in known})
        return {worker: split.get(worker, float(self.batch)) for worker in self._sizes}


def in_proportion(total: int, speeds: Mapping[int, float]) -> dict[int, float]:
    """Split a total by speed. A worker that would get less than 1 gets 1, and the others share the rest."""
    shares: dict[int, float] = {}
    rest = dict(speeds)
    while rest:
        whole = sum(rest.values())
        parts = {worker: total * speed / whole for worker, speed in rest.items()}
        slowest = [worker for worker, part in parts.items() if part < 1]
        if not slowest:
            return shares | parts
        for worker in slowest:
            shares[worker] = 1.0
            del rest[worker]
        total -= len(slowest)
    return shares


def rounded(shares: Mapping[int, float], total: int) -> dict[int, int]:
    """Whole numbers that add up to the total; what rounding down leaves goes to the largest remainders."""
    sizes = {worker: int(share) for worker, share in shares.items()}
    order = sorted(shares, key=lambda worker: (sizes[worker] - shares[worker], worker))
    for worker in order[: total - sum(sizes.values())]:
        sizes[worker] += 1
    return sizes


def told(sizes: Mapping[int, int]) -> str:
    """The sizes as a note for the user: each with its rank, or their range if there are many."""
    if len(sizes) > MANY:
        return f"balanced: batches of {min(sizes.values())} to {max(sizes.values())} samples from now on"
    listed = ", ".join(f"{sizes[rank]} (rank {rank})" for rank in sorted(sizes))
    return f"balanced: batches of {listed} samples from now on"
