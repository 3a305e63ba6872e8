"""A peer on another host: memories that stand for its own, and what of them has to travel.

At home a worker's vectors lie in memory that the meeting place reads. Of a worker elsewhere it reads copies:
what the worker brings to a meeting arrives in them ahead of its word, and what the meeting answers leaves
ahead of the answer. A vote brings nothing; a whole replica comes when the run is evaluated or its worker
leaves, and at no other time. What a worker names is checked here: it may name memory that does not exist.

A vector that several workers of a host get travels once, and is copied there. All vectors for a host, and
what speaks of them, go through one queue: none takes a place from which another is still to be copied.

Compressed vectors are taken apart here, as they arrive. An average of such is not compressed any more. Where
its summands come to fewer bytes, those of other hosts are sent instead, and added up there.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.protocols.core.meeting import Gathered
from paceline.protocols.core.operations import CENTRE
from paceline.runtime.hosts.host_wire import HostWire, Lying
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import HOST, SHARED, Copy, Fetch, SumVectors, Term, VectorStaged
from paceline.runtime.messages.memories import (
    COMMON,
    FIRST_LENT,
    MOST_LENT,
    OWN,
    SEGMENT,
    STAGED,
    WEIGHTS,
    MemoryStretch,
    Places,
    lent_at,
)
from paceline.store.compression.unpack import Unpacker
from paceline.store.layout import Layout
from paceline.store.replicas import BUFFERS, LENT, PARAMETERS, answer_bytes, is_buffers


class Summand(NamedTuple):
    """What a worker has brought to an average."""

    rank: int
    share: float
    packed: bytearray | None
    """None: it was not compressed."""


class Made(NamedTuple):
    """What an average was made of."""

    summands: list[Summand]
    gathered: Gathered


class RemotePeer:
    """One worker's. Told by the session's reading thread what it says, asked by the run's what to answer."""

    def __init__(self, host: HostWire, lane: int, layout: Layout, memories: dict[int, memoryview]) -> None:
        self._host, self._lane = host, lane
        self._layout, self._places = layout, Places(layout)
        self._cells = range(CENTRE, host.config.workers)
        self.memories = memories
        self._lent = 0
        self._unseen: list[int] = []
        """Descriptors of lent memory that the meeting place has not been given yet."""
        self._asked: m.Meet | m.Away | m.Back | None = None
        """What it sleeps over."""
        self._started: dict[int, m.Meet] = {}
        """What it has started and has not been sent the answer of, by lane."""
        self._unpacking = Unpacker(layout, host.config.compress)
        self._staged: bytearray | None = None
        """Where a compressed vector arrives."""
        self.packed: dict[int, bytearray] = {}
        """Those that have arrived, by lane, for the meeting place to take."""
        self._made: dict[int, Made] = {}
        """What averages that are to be sent were made of, by number."""
        self._wanted = self._fetched = 0
        """How often its replica was asked for, and came."""

    # -- what it says: called by the session's reading thread ---------------------------------

    def lend(self) -> None:
        """The worker lends memory; here is what stands for it."""
        if self._lent >= MOST_LENT:
            raise RunError(f"a worker lends more than {MOST_LENT} memories.")
        segment = Segment.create(answer_bytes(self._layout), "what a worker elsewhere lends")
        self.memories[FIRST_LENT + self._lent] = memoryview(segment.map)
        self._lent += 1
        self._unseen.append(segment.fd)

    def fills(self, memory: int) -> bool:
        """Whether the worker's host may write to what stands for a memory."""
        return memory in (SEGMENT, WEIGHTS) or memory >= FIRST_LENT

    def stages(self, size_bytes: int) -> None:
        """A compressed vector is about to arrive: make room, but no more than a vector needs."""
        if not 0 < size_bytes <= self._unpacking.longest_bytes:
            raise RunError(f"a compressed vector of {size_bytes} bytes.")
        self._staged = bytearray(size_bytes)

    @property
    def staged(self) -> memoryview | None:
        """Where it arrives."""
        return None if self._staged is None else memoryview(self._staged)

    def _open(self, message: m.Meet) -> None:
        """What was staged is the vector of this operation: put it where that lies."""
        staged, self._staged, call = self._staged, None, message.call
        if staged is None and not message.packed:
            return
        lent = message.place >= LENT and not is_buffers(message.place)
        if call is None or call.kind == "agree" or not lent or len(staged or b"") != message.packed:
            raise RunError(f"a compressed vector of {message.packed} bytes that was not sent.")
        assert staged is not None
        self._unpacking.open(staged, self._unpacking.parts(self.memories[lent_at(message.place)]), call.part)
        self.packed[call.lane] = staged

    def hears(self, message: m.FromWorker) -> list[int]:
        """The worker says something; the descriptors of what it lends from now on."""
        if isinstance(message, m.Away | m.Back):
            self._asked = message
        if not isinstance(message, m.Meet):
            return []
        self._check(message)
        self._open(message)
        if message.lane > 0:
            self._started[message.lane] = message
        elif not message.goes_on:
            self._asked = message
        unseen, self._unseen = self._unseen, []
        return unseen

    def _check(self, message: m.Meet) -> None:
        call, trade = message.call, message.trade
        tensors = call.part.tensors if call is not None and call.part is not None else ()
        cells = (message.cell, *((trade.cell, trade.other) if trade is not None else ()))
        places = range(LENT + 2 * self._lent)
        if not (
            {message.place, message.into, message.model, message.stood} <= set(places)
            and all(tensor in range(self._places.tensors) for tensor in tensors)
            and all(cell is None or cell in self._cells for cell in cells)
        ):
            raise RunError("a worker names a vector that does not exist.")

    def arrives(self) -> None:
        """Its replica is here."""
        self._fetched += 1

    # -- what it is told: called by the run's own thread --------------------------------------

    def send_first(self) -> None:
        """Send the parameters that all begin with."""
        whole = (0, self._layout.weights_bytes)
        if not self._host.equipped:
            self._host.equipped = True
            self._host.session.send_memory(SHARED, COMMON, self.memories[WEIGHTS], *whole, SHARED)
        self._copy(SHARED, [MemoryStretch(COMMON, *whole)], [MemoryStretch(WEIGHTS, *whole)])

    def send_answer(self, message: msgspec.Struct) -> bool:
        """Send the vector that an answer speaks of; whether it does, and so has to queue behind it."""
        stretches = self._answer(message)
        self._send(stretches, message.number if isinstance(message, m.Met) else 0)
        return bool(stretches) or (isinstance(self._asked, m.Meet) and self._asked.wait > 0)

    def send_ahead(self, lane: int, number: int) -> None:
        """The answer to what this worker has started is there: it need not wait until it is asked for."""
        self._send(self._to_started(lane), number)

    def made_of(self, number: int, made: Made) -> None:
        """What the average of this number, which is to be sent, was made of."""
        self._made[number] = made

    def _send(self, stretches: list[MemoryStretch], number: int) -> None:
        """Send a vector, unless its host has it. Numbers tell which are the same; 0: no other is."""
        host, here, made = self._host, self._host.answer, self._made.pop(number, None)
        if not stretches:
            return
        if number == here.number > 0:
            if here.lane != SHARED:
                self._copy(here.lane, here.stretches, stretches)
            return
        lane = SHARED if stretches[0].memory == COMMON else self._lane
        first, host.newest = number > host.newest, max(number, host.newest)
        if made is None or not first or not self._send_summands(made, lane, stretches):
            for memory, start, stop in stretches:
                host.session.send_memory(lane, memory, self.memories[memory], start, stop, SHARED)
        host.answer = Lying(number, lane, stretches)

    def _send_summands(self, made: Made, lane: int, stretches: list[MemoryStretch]) -> bool:
        """Send what other hosts have brought to an average instead of it; whether that is less.

        Not a second time: the host keeps what its own workers have brought until it was answered.
        """
        lanes = {line.rank: line.lane for line in list(self._host.lines.values())}
        terms, sent = [], bytearray()
        for rank, share, packed in made.summands:
            if packed is None:
                return False
            terms.append(Term(share, lanes.get(rank), len(packed)))
            sent += b"" if rank in lanes else packed
        if len(sent) >= sum(stop - start for _, start, stop in stretches):
            return False
        order = SumVectors(lane, stretches[0].memory, made.gathered.part, made.gathered.lane, terms)
        if sent:
            self._order(VectorStaged(len(sent)))
            self._host.session.send_memory(self._lane, STAGED, memoryview(sent), 0, len(sent), SHARED)
        self._order(order)
        return True

    def _order(self, order: msgspec.Struct) -> None:
        self._host.session.send(self._lane, msgspec.msgpack.encode(order), HOST, SHARED)

    def _copy(self, lane: int, sources: list[MemoryStretch], targets: list[MemoryStretch]) -> None:
        self._order(Copy(lane, sources, targets))

    def fetch(self, place: int) -> None:
        """Have the replica of this worker brought up to date here, as it lies still in a place."""
        self._wanted += 1
        self._host.session.send(self._lane, msgspec.msgpack.encode(Fetch(place)), HOST)

    @property
    def fetching(self) -> bool:
        """Whether it is still on its way."""
        return self._fetched < self._wanted

    def _answer(self, message: msgspec.Struct) -> list[MemoryStretch]:
        """What has to be there before this answer is."""
        asked = self._asked
        if isinstance(asked, m.Away) and isinstance(message, m.Release) and not asked.distance:
            return self._places.answer(OWN, PARAMETERS) + self._places.answer(OWN, BUFFERS)
        if not isinstance(asked, m.Meet) or not isinstance(message, m.Met):
            return []
        if asked.wait and not asked.test:
            return self._to_started(asked.wait)
        if not asked.gets:
            return []
        call = asked.call
        memory, part = COMMON if message.shared else OWN, None if call is None else call.part
        return self._places.answer(memory, asked.place, part)

    def _to_started(self, lane: int) -> list[MemoryStretch]:
        """The answer to a started operation; nothing, if it was sent before."""
        message = self._started.pop(lane, None)
        if message is None:
            return []
        return self._places.of(message.into, None if message.call is None else message.call.part)
