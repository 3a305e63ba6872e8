"""What a host and the store say to each other, besides what its workers have to say."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from paceline.decoding import MessageDecoder
from paceline.protocols.core.parts import Part
from paceline.runtime.messages.memories import MemoryStretch
from paceline.runtime.messages.portions import PortionPlan

WORKER, HOST = 0, 1
"""Who speaks in a message: a worker (or the store to it), or its host."""
SHARED = 0xFFFF
"""The lane of what all workers of a host share."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A worker's initial values are about to be sent, or a file of its own."""

    size_bytes: int


class Belongs(msgspec.Struct, frozen=True, tag=True):
    """What was offered and sent is a file of this peer's."""

    kind: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A worker of the host is gone."""

    detail: str
    torn: bool = False
    """Whether pieces of what it pushed may never arrive."""


class Withdraws(msgspec.Struct, frozen=True, tag=True):
    """A worker is about to leave because its host was asked to end: its place may be taken again."""


class LendMemory(msgspec.Struct, frozen=True, tag="Lend"):
    """A peer lends further memory: make room."""


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """A peer's replica has been sent, as it was asked for."""


class Equip(msgspec.Struct, frozen=True, tag=True):
    """A worker's memory is about to arrive: make room."""

    shared: bool
    peer: bool = False
    """Whether it is a peer, which needs memory for answers."""


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Send this worker's replica, which lies still."""

    place: int = 0
    """Where it lies; 0: where the worker computes, and it sleeps."""


class Copy(msgspec.Struct, frozen=True, tag=True):
    """What this worker is to get lies at its host already, with another worker or in what all share."""

    lane: int
    """Whose memory to take it from."""
    sources: list[MemoryStretch]
    targets: list[MemoryStretch]


class VectorStaged(msgspec.Struct, frozen=True, tag="Staged"):
    """So many bytes of compressed vectors are about to be sent."""

    size_bytes: int


class Term(NamedTuple):
    """A compressed vector of a sum: one that a worker of the host has brought, or the next that was sent."""

    share: float
    lane: int | None
    size_bytes: int


class SumVectors(msgspec.Struct, frozen=True, tag="Sum"):
    """Of what this worker is to get, these are the summands: add them up."""

    lane: int
    """Whose memory it goes to."""
    memory: int
    part: Part | None
    operation: int
    """The lane of the operation that they were brought to."""
    terms: list[Term]


class ClocksNoted(msgspec.Struct, frozen=True, tag="Clocks"):
    """How far ranks are, for workers that keep barriers of their own: note it on the host's board."""

    ranks: int
    """How many the board has."""
    clocks: dict[int, int | None]
    """None: it takes no part."""


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The store has no more to say to this worker."""


class End(msgspec.Struct, frozen=True, tag=True):
    """This worker is stuck, and the run goes on without it: end its process."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """The run is over; it is of no use to come back."""


FromHost = Offer | Belongs | Gone | Withdraws | LendMemory | Fetched | VectorStaged
ToHost = Equip | Offer | Belongs | Fetch | Copy | VectorStaged | SumVectors | Dismissed | End | PortionPlan
ToAll = ClocksNoted | Over
"""To a host, about all of its workers."""
host_decoder: MessageDecoder[FromHost] = MessageDecoder(FromHost)
guest_decoder: MessageDecoder[ToHost] = MessageDecoder(ToHost)
shared_decoder: MessageDecoder[ToAll] = MessageDecoder(ToAll)
