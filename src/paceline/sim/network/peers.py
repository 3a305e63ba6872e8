"""What travels between peers on hosts that share links, and when it is there.

*Star*, as in a run over several hosts. Whoever comes to a meeting sends its vector to the first host at once.
As soon as all are there the answers leave together: an average once per host, a mixture once per worker, a
vote in a few bytes. Where summands are compressed and come to less, a host is sent those of other hosts
instead of the average. So the first host's link carries everything, and a slow link elsewhere delays its own
host.

*Ring*, as with gloo and DDP. Of an average among m workers everybody passes 2(m-1)/m of the vector on to the
next; if it is compressed in a way that does not add up, m-1 whole ones. Nobody is done before all are. A
mixture goes to each neighbour directly.

An exchange with a cell goes to the first host and back in either case: that is where cells are. So does, in a
star, the question whether something has arrived, and it queues behind the vectors that are under way.
"""

from __future__ import annotations

from itertools import pairwise

from paceline.protocols.core.meeting import VOTE_BYTES, Call, Gathered, Turn
from paceline.protocols.rules.compression import Compression
from paceline.sim.cluster import Cluster
from paceline.sim.network.network import Network, Parcel

MEETING = 0
"""The host with the meeting place."""


class HostCosts:
    """One per simulated run of peers."""

    def __init__(self, cluster: Cluster, compress: Compression, scale: float = 1.0) -> None:
        """`scale`: how much larger vectors are taken to be than they are."""
        self._network = Network(cluster)
        self._ring, self._adds_up, self._scale = cluster.fabric == "ring", compress.adds_up, scale
        self._there_at: dict[tuple[int, Turn], float] = {}
        """When what a worker has brought is at the meeting place."""

    def came(self, rank: int, call: Call, now: float) -> None:
        """A worker comes to a joint operation, with what it brings."""
        if not self._ring:
            size = call.given_bytes * (1.0 if call.kind == "agree" else self._scale)
            parcel = Parcel(self._network.host_of[rank], MEETING, size)
            [self._there_at[rank, call.turn]] = self._network.move([parcel], now)

    def joint(self, gathered: Gathered, now: float) -> dict[int, float]:
        """How long it takes until each has its answer, now that the last has come."""
        if self._ring:
            return self._around(gathered, now)
        turn = gathered.turn
        brought = {rank for row in gathered.rows.values() for rank in row} | set(gathered.receivers)
        complete = max(now, *(self._there_at.get((rank, turn), now) for rank in brought))
        if gathered.kind == "mix":  # others may still take of it
            brought = set(range(len(self._network.host_of))) if gathered.last else set()
        for rank in brought if gathered.kind == "mix" or gathered.lane > 0 else ():
            self._there_at.pop((rank, turn), None)
        return self._answers(gathered, complete, now)

    def exchange(self, rank: int, there_bytes: int, back_bytes: int, now: float) -> float:
        """How long it takes there and back; nobody else is needed."""
        return self._there_and_back(rank, self._scale * there_bytes, self._scale * back_bytes, now)

    def ask(self, rank: int, now: float) -> float:
        """How long it takes to ask whether something has arrived: behind what is under way already."""
        return 0.0 if self._ring else self._there_and_back(rank, VOTE_BYTES, VOTE_BYTES, now)

    def _there_and_back(self, rank: int, given: float, got: float, now: float) -> float:
        host = self._network.host_of[rank]
        [there] = self._network.move([Parcel(host, MEETING, given)], now, now)
        [back] = self._network.move([Parcel(MEETING, host, got)], there, now)
        return back - now

    # -- through the first host ---------------------------------------------------------------

    def _answers(self, gathered: Gathered, complete: float, now: float) -> dict[int, float]:
        hosts = {rank: self._network.host_of[rank] for rank in gathered.receivers}
        if gathered.kind == "mix":
            size = self._scale * gathered.size_bytes
            ends = self._network.move([Parcel(MEETING, x, size) for x in hosts.values()], complete, now)
            return {rank: end - now for rank, end in zip(hosts, ends, strict=True)}
        targets = list(dict.fromkeys(hosts.values()))
        parcels = [Parcel(MEETING, host, self._answer_bytes(gathered, host)) for host in targets]
        there = dict(zip(targets, self._network.move(parcels, complete, now), strict=True))
        return {rank: there[host] - now for rank, host in hosts.items()}

    def _answer_bytes(self, gathered: Gathered, host: int) -> float:
        """What a host is sent: a vote, an average, or other hosts' compressed summands if that is less."""
        if gathered.kind == "agree":
            return gathered.given_bytes
        whole, packed = gathered.size_bytes, gathered.sent_bytes
        row = gathered.rows[gathered.receivers[0]]
        elsewhere = sum(self._network.host_of[rank] != host for rank in row)
        return self._scale * (whole if packed == whole else min(whole, elsewhere * packed))

    # -- around -------------------------------------------------------------------------------

    def _around(self, gathered: Gathered, now: float) -> dict[int, float]:
        size = gathered.given_bytes * (1.0 if gathered.kind == "agree" else self._scale)
        if gathered.kind == "mix":
            return self._to_neighbours(gathered, size, now)
        ranks, count = gathered.receivers, len(gathered.receivers)
        hosts = [self._network.host_of[rank] for rank in (*ranks, ranks[0])]
        steps = (2 if self._adds_up or gathered.kind == "agree" else 1) * (count - 1)
        passed_on = steps * size / (count if steps > count - 1 else 1)
        parcels = [Parcel(one, other, passed_on) for one, other in pairwise(hosts) if one != other]
        ends = self._network.move(parcels, now, now) if count > 1 else []
        late = max((self._network.latency_s(one, other) for one, other, _ in parcels), default=0.0)
        spent = max([now, *ends]) - now + max(0, steps - 1) * late
        return dict.fromkeys(ranks, spent)

    def _to_neighbours(self, gathered: Gathered, size: float, now: float) -> dict[int, float]:
        """Everybody sends its vector to each neighbour; one has all when the last of them is there."""
        ways = [(peer, rank) for rank in gathered.receivers for peer in gathered.rows[rank] if peer != rank]
        host_of, spent = self._network.host_of, dict.fromkeys(gathered.receivers, 0.0)
        ends = self._network.move([Parcel(host_of[a], host_of[b], size) for a, b in ways], now, now)
        for (_, rank), end in zip(ways, ends, strict=True):
            spent[rank] = max(spent[rank], end - now)
        return spent
