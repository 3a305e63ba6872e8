"""The compressed vectors that workers have brought to the meeting place, until they are added up."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import RunError
from paceline.protocols.core.meeting import Gathered
from paceline.runtime.hosts.remote_peer import Made, RemotePeer, Summand
from paceline.runtime.hosts.remote_worker import RemoteWorker
from paceline.runtime.messages.workers import Meet
from paceline.runtime.run.member import Member
from paceline.store.compression.unpack import Unpacker
from paceline.store.layout import Layout
from paceline.store.replicas import Replica


class PackedVectors:
    """One run's."""

    def __init__(self, layout: Layout, compress: str) -> None:
        self._unpacking = Unpacker(layout, compress)
        self._there: dict[tuple[int, int], bytearray] = {}
        """By rank and lane."""

    def came(self, member: Member, replica: Replica, message: Meet) -> None:
        """A worker has; what it brings may be compressed. What is from elsewhere was opened on arrival."""
        call, line = message.call, member.channel
        if not message.packed or call is None:
            return
        if isinstance(line, RemoteWorker):
            self._there[member.rank, call.lane] = line.known_peer.packed.pop(call.lane)
        else:
            self._there[member.rank, call.lane] = self._opened(member.rank, replica, message)

    def _opened(self, rank: int, replica: Replica, message: Meet) -> bytearray:
        """Put the vector where it lies compressed."""
        assert message.call is not None
        if message.packed > self._unpacking.longest_bytes:
            raise RunError(f"rank {rank} brings a compressed vector of {message.packed} bytes.")
        packed = bytearray(replica.lent(message.place)[: message.packed].numpy().tobytes())
        self._unpacking.open(packed, replica.parts(message.place), message.call.part)
        return packed

    def used(self, gathered: Gathered, number: int = 0, to: Sequence[RemotePeer] = ()) -> None:
        """An operation is carried out. Tell these what the average of this number is made of."""
        row = gathered.rows[gathered.receivers[0]]
        ranks = {rank for each in gathered.rows.values() for rank in each}
        taken = {rank: self._there.pop((rank, gathered.lane), None) for rank in ranks}
        summands = [Summand(rank, share, taken[rank]) for rank, share in row.items()]
        for line in to:
            line.made_of(number, Made(summands, gathered))
