"""The pipes of a cluster's hosts and racks, and the way from one host to another.

    host --up--> [its rack's uplink --> the other rack's downlink] --> down--> host

A switch is taken to be fast enough for all of its ports. Nothing on one host crosses any link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.sim.cluster import Cluster
from paceline.sim.network.pipes import Pipe, Transfer, carry


class Parcel(NamedTuple):
    """Bytes from one host to another, by number."""

    source: int
    target: int
    size_bytes: float


class Network:
    """One per simulated run: it remembers what is under way."""

    def __init__(self, cluster: Cluster) -> None:
        self._hosts, self._racks = cluster.host, cluster.racks
        self.host_of = [number for number, host in enumerate(cluster.host) for _ in range(host.workers)]
        """Of every rank."""
        self._out = [Pipe(host.bandwidth_bytes_per_s) for host in cluster.host]
        self._in = [Pipe(host.bandwidth_bytes_per_s) for host in cluster.host]
        self._rack_out = {name: Pipe(link.bandwidth_bytes_per_s) for name, link in cluster.racks.items()}
        self._rack_in = {name: Pipe(link.bandwidth_bytes_per_s) for name, link in cluster.racks.items()}

    def move(self, parcels: Sequence[Parcel], start: float, now: float | None = None) -> list[float]:
        """When each of them arrives, if all leave at `start`. Later calls ask for nothing before `now`, which
        is the start unless it is told."""
        going = [Transfer(self._route(each), each.size_bytes) for each in parcels]
        for transfer in going:
            for pipe in transfer.route:
                pipe.forget(start if now is None else now)
        return [
            end + self.latency_s(each.source, each.target)
            for each, end in zip(parcels, carry(going, start), strict=True)
        ]

    def latency_s(self, source: int, target: int) -> float:
        """Of the way from one host to another."""
        if source == target:
            return 0.0
        one, other = self._hosts[source], self._hosts[target]
        late = one.latency_s + other.latency_s
        if one.rack != other.rack:
            late += sum(self._racks[rack].latency_s for rack in (one.rack, other.rack) if rack)
        return late

    def _route(self, parcel: Parcel) -> tuple[Pipe, ...]:
        source, target, _ = parcel
        if source == target:
            return ()
        one, other = self._hosts[source].rack, self._hosts[target].rack
        between = [self._rack_out[one]] if one and one != other else []
        between += [self._rack_in[other]] if other and one != other else []
        return (self._out[source], *between, self._in[target])
