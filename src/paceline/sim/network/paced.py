"""What travels with a store: gradients to the host that has it, weights back.

Workers of that host share its memory, and nothing of theirs travels. Weights that workers of one host are
given together in lockstep travel once. A store on several hosts has an equal portion on each of the first
ones: a gradient has arrived when the last of its pieces has, and weights likewise. (Real portions end between
two parameters, so they are only nearly equal.)
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sim.cluster import Cluster
from paceline.sim.network.network import Network, Parcel


class StoreWays:
    """One per simulated run with a store, on hosts that share links."""

    def __init__(self, cluster: Cluster) -> None:
        self._network = Network(cluster)
        self._holders = range(cluster.store_hosts)
        self._piece_bytes = (cluster.model_bytes or 0) / cluster.store_hosts

    def pull(self, workers: Sequence[int], at: float, *, once: bool) -> dict[int, float]:
        """When workers that are released together have their weights; `once`: a host gets one copy."""
        hosts = [self._network.host_of[worker] for worker in workers]
        targets = list(dict.fromkeys(hosts)) if once else hosts
        ends = self._all_pieces([[(holder, host) for holder in self._holders] for host in targets], at)
        if not once:
            return dict(zip(workers, ends, strict=True))
        there = dict(zip(targets, ends, strict=True))
        return {worker: there[host] for worker, host in zip(workers, hosts, strict=True)}

    def push(self, workers: Sequence[int], at: float) -> dict[int, float]:
        """When gradients that are ready at the same time have reached the store."""
        hosts = [self._network.host_of[worker] for worker in workers]
        ends = self._all_pieces([[(host, holder) for holder in self._holders] for host in hosts], at)
        return dict(zip(workers, ends, strict=True))

    def _all_pieces(self, ways: list[list[tuple[int, int]]], at: float) -> list[float]:
        """Send one piece over each way of each list, all together; when the last of each list is there."""
        parcels = [Parcel(source, target, self._piece_bytes) for each in ways for source, target in each]
        ends, count = self._network.move(parcels, at), len(self._holders)
        return [max(ends[first : first + count]) for first in range(0, len(ends), count)]


def store_ways(cluster: Cluster) -> StoreWays | None:
    """None: every worker has a way of its own, and all take the same time at any time."""
    return StoreWays(cluster) if cluster.host else None
