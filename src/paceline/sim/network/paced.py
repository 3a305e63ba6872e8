"""What travels with a store: gradients to the first host, weights back.

Workers of the first host share its memory, and nothing of theirs travels. Weights that workers of one host
are given together in lockstep travel once.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sim.cluster import Cluster
from paceline.sim.network.network import Network, Parcel

STORE = 0
"""The host that holds it."""


class StoreWays:
    """One per simulated run with a store, on hosts that share links."""

    def __init__(self, cluster: Cluster) -> None:
        self._network = Network(cluster)
        self._size_bytes = cluster.model_bytes or 0

    def pull(self, workers: Sequence[int], at: float, *, once: bool) -> dict[int, float]:
        """When workers that are released together have their weights; `once`: a host gets one copy."""
        hosts = [self._network.host_of[worker] for worker in workers]
        targets = list(dict.fromkeys(hosts)) if once else hosts
        ends = self._network.move([Parcel(STORE, host, self._size_bytes) for host in targets], at)
        if not once:
            return dict(zip(workers, ends, strict=True))
        there = dict(zip(targets, ends, strict=True))
        return {worker: there[host] for worker, host in zip(workers, hosts, strict=True)}

    def push(self, workers: Sequence[int], at: float) -> dict[int, float]:
        """When gradients that are ready at the same time have reached the store."""
        hosts = [self._network.host_of[worker] for worker in workers]
        ends = self._network.move([Parcel(host, STORE, self._size_bytes) for host in hosts], at)
        return dict(zip(workers, ends, strict=True))


def store_ways(cluster: Cluster) -> StoreWays | None:
    """None: every worker has a way of its own, and all take the same time at any time."""
    return StoreWays(cluster) if cluster.host else None
