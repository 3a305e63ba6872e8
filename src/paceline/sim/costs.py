"""What it costs peers to meet, in seconds: one model for sizes alone and for exact simulation.

An average among m workers costs what a ring all-reduce does, 2(m-1) messages of an m-th of the vector on
the slowest link among them; if it is compressed in a way that does not add up, m-1 messages of the whole
compressed vector, since each has to reach everybody. A mixture costs one message per neighbour, and of those
whose vectors go into it, the slowest counts; a vote costs an all-reduce of a few bytes, an exchange one
message each way. That is where every worker has a link of its own, and all links are always free. On hosts
that share theirs (`[[host]]` in a cluster file) it is counted who sends what to whom: `network/peers.py`.
"""

from __future__ import annotations

from paceline.protocols.core.meeting import Call, Gathered
from paceline.protocols.rules.compression import Compression
from paceline.sim.cluster import Cluster
from paceline.sim.network.links import Link
from paceline.sim.network.peers import HostCosts


class Costs:
    """The links of one cluster."""

    def __init__(self, cluster: Cluster, compress: Compression, scale: float = 1.0) -> None:
        """`scale`: how much larger vectors are taken to be than they are."""
        self._links = [profile.link for profile in cluster.profiles()]
        self._adds_up, self._scale = compress.adds_up, scale

    def came(self, rank: int, call: Call, now: float) -> None:
        """A worker comes to a joint operation: all that it costs is counted when the last has come."""

    def joint(self, gathered: Gathered, now: float) -> dict[int, float]:
        """How long it takes until each has its answer, now that the last has come."""
        return dict.fromkeys(gathered.receivers, self.joint_s(gathered))

    def joint_s(self, gathered: Gathered) -> float:
        """How long a joint operation takes from when the last has come."""
        if gathered.kind == "agree":
            return ring_s([self._links[rank] for rank in gathered.receivers], gathered.given_bytes)
        size = round(self._scale * gathered.given_bytes)
        if gathered.kind == "mix":
            each = gathered.messages.items()
            return max(messages * self._links[rank].seconds(size) for rank, messages in each)
        links = [self._links[rank] for rank in gathered.receivers]
        if self._adds_up:
            return ring_s(links, size)
        return max((len(links) - 1) * link.seconds(size) for link in set(links))

    def ask(self, rank: int, now: float) -> float:
        """How long it takes to ask whether something has arrived: everybody sees its own end of its link."""
        return 0.0

    def exchange(self, rank: int, there_bytes: int, back_bytes: int, now: float) -> float:
        """There and back, and nobody else is needed."""
        both = there_bytes, back_bytes
        return sum(self._links[rank].seconds(round(self._scale * size)) for size in both)


def costs_of(cluster: Cluster, compress: Compression, scale: float = 1.0) -> Costs | HostCosts:
    """By the links that the cluster has."""
    return (HostCosts if cluster.host else Costs)(cluster, compress, scale)


def ring_s(links: list[Link], size_bytes: int) -> float:
    """How long a ring all-reduce takes: as long as the slowest link needs for its messages."""
    others = len(links) - 1
    if others <= 0:
        return 0.0
    return max(2 * others * link.seconds(-(-size_bytes // (others + 1))) for link in set(links))
