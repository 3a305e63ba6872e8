"""The owner's end of one worker on another host."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.runtime.hosts.file_transfer import files_of, keep
from paceline.runtime.hosts.host_wire import HostWire
from paceline.runtime.hosts.remote_peer import RemotePeer
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import (
    HOST,
    SHARED,
    WORKER,
    Belongs,
    ClocksNoted,
    Dismissed,
    End,
    Equip,
    Fetched,
    Offer,
)
from paceline.runtime.messages.memories import INITIAL, SEGMENT, STAGED, WEIGHTS
from paceline.runtime.messages.portions import PortionPlan
from paceline.store.disk.folders import partial_of
from paceline.store.layout import Layout

_encoder = msgspec.msgpack.Encoder()


class RemoteEvent(NamedTuple):
    """Something for the loop: a message of a worker, that its replica is here, or (None) that it is gone."""

    line: RemoteWorker
    message: m.FromWorker | Fetched | None
    fds: list[int]
    detail: str = ""


class RemoteWorker:
    """The way to one worker on another host; what it is given here, it passes on."""

    def __init__(self, host: HostWire, lane: int) -> None:
        self.host = host
        self.lane = lane
        self.rank: int | None = None
        self.pid = 0
        self.layout: Layout | None = None
        self.plan: PortionPlan | None = None
        """Who holds which portion of the weights, if it is not all here."""
        self._initial: Segment | None = None
        self._shared = False
        self._segment: memoryview | None = None
        self._weights: memoryview | None = None
        self._version: int | None = None
        self._varies = False
        """Whether weights of one version may differ: a look-ahead, or the weights themselves."""
        self.peer: RemotePeer | None = None
        """Its memories, if it is a peer."""
        self.gone = False
        """Whether its host has told that it is gone, or is gone itself."""
        self.torn = False
        """Whether pieces of what it pushed may never arrive."""
        self._rewrites = False
        """Whether it was asked to write to its weights, and sends them back."""
        self.closed = False
        self.withdrew = False
        """Whether it leaves because its host was asked to end."""

    @property
    def host_number(self) -> int | None:
        """Which host that is."""
        return self.host.number

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send a message, after the memory it speaks of."""
        if isinstance(message, ClocksNoted):
            self.host.session.send(SHARED, _encoder.encode(message), HOST)
            return
        shared = self._shared and isinstance(message, m.Release)
        if isinstance(message, m.Ready):
            shared = self._equip(message, fds)
        elif self.peer is not None:
            shared = self.peer.send_answer(message)
        elif isinstance(message, m.Release):
            self._send_weights(message.version)
        elif isinstance(message, m.RunAfterStep):
            self._version = None
            self._send_weights(None)
        self._rewrites = isinstance(message, m.RunAfterStep)
        self.host.session.send(self.lane, _encoder.encode(message), WORKER, SHARED if shared else None)

    def close(self) -> None:
        """The store is done with this worker."""
        if not self.closed:
            self.closed = True
            self.host.session.send(self.lane, _encoder.encode(Dismissed()), HOST)

    def end(self) -> None:
        """Have its host end this worker, which is stuck."""
        self.host.session.send(self.lane, _encoder.encode(End()), HOST)

    def _equip(self, ready: m.Ready, fds: tuple[int, ...]) -> bool:
        """Its memory, at this end; whether it waits in the queue of what its host's workers share."""
        assert self.layout is not None, "a worker registers before it is equipped"
        board = ready.barrier is not None  # its host has a copy, which was sent in the common queue
        peer = len(fds) > len((SEGMENT, WEIGHTS)) and not board
        writes = mmap.ACCESS_READ if ready.shared else mmap.ACCESS_WRITE
        self._segment, self._weights = _map(fds[0], mmap.ACCESS_WRITE), _map(fds[1], writes)
        if peer:
            answers = (_map(fd, mmap.ACCESS_READ) for fd in fds[2:])
            memories = dict(enumerate((self._segment, self._weights, *answers)))
            self.peer = RemotePeer(self.host, self.lane, self.layout, memories)
        self._shared, self._varies = ready.shared, ready.ahead
        session, queue = self.host.session, SHARED if ready.shared or peer or board else None
        if self.plan is not None:
            session.send(self.lane, _encoder.encode(self.plan), HOST, queue)
        session.send(self.lane, _encoder.encode(Equip(ready.shared, peer)), HOST, queue)
        buffers = self.layout.gradient_end
        session.send_memory(self.lane, SEGMENT, self._segment, buffers, len(self._segment), queue)
        if self.peer is not None:
            self.peer.send_first()
            self._send_belongings()
        elif not ready.shared or not self.host.equipped:
            lane = SHARED if ready.shared else self.lane
            for start, stop in [(0, len(self._weights))] if self.plan is None else self.plan.first_spans:
                session.send_memory(lane, WEIGHTS, self._weights, start, stop, queue)
            self.host.equipped = ready.shared
        return queue is not None

    def _send_belongings(self) -> None:
        """The files that a peer goes on from."""
        resume = self.host.config.resume
        session = self.host.session
        for kind, content in files_of(Path(resume), self.rank) if resume is not None else ():
            session.send(self.lane, _encoder.encode(Offer(len(content))), HOST, SHARED)
            session.send_memory(self.lane, INITIAL, content, 0, len(content), SHARED)
            session.send(self.lane, _encoder.encode(Belongs(kind)), HOST, SHARED)

    def _send_weights(self, version: int | None) -> None:
        """What training moves, unless this version is there already; None: it will be another one."""
        assert self.layout is not None
        assert self._weights is not None
        known = self.host.version if self._shared else self._version
        if known == version is not None and not self._varies:
            return
        self._version = version
        if self._shared:
            self.host.version = version
        lane = SHARED if self._shared else self.lane
        spans = [(region.weights, region.weights + region.size_bytes) for region in self.layout.regions]
        if self.plan is not None and version is not None:  # other holders send theirs
            spans = self.plan.first_spans[:1]
        for start, stop in spans:
            self.host.session.send_memory(lane, WEIGHTS, self._weights, start, stop, lane)

    # -- called by the session's reading thread ------------------------------------------------

    def place(self, what: int, offset: int, length: int) -> memoryview:
        """Where a piece that arrives belongs."""
        memory = self._segment
        if what == INITIAL:
            memory = memoryview(self._initial.map) if self._initial is not None else None
        elif self.peer is not None and what == STAGED:
            memory = self.peer.staged
        elif self.peer is not None:
            memory = self.peer.memories.get(what) if self.peer.fills(what) else None
        elif what == WEIGHTS and self._rewrites:
            memory = self._weights
        elif what != SEGMENT:
            memory = None
        if memory is None or offset + length > len(memory):
            raise RunError(f"{length} bytes at {offset} for a memory that was not agreed on.")
        return memory[offset : offset + length]

    @property
    def known_peer(self) -> RemotePeer:
        """What only a peer has that was equipped."""
        if self.peer is None:
            raise RunError("a worker speaks as a peer, and is none.")
        return self.peer

    def offered(self, size_bytes: int) -> None:
        """Make room for the initial values, or a file; in place of what was offered before and not used."""
        if size_bytes < 1:
            raise RunError(f"an offer of {size_bytes} bytes is none.")
        self.withdrawn()
        self._initial = Segment.create(size_bytes, "what a worker elsewhere has")

    def withdrawn(self) -> None:
        """What was offered is not waited for any more."""
        if self._initial is not None:
            self._initial.close_fd()
        self._initial = None

    def belongs(self, kind: int) -> None:
        """A file of this peer's is here: it has left, and may be asked to go on."""
        offered, self._initial = self._initial, None
        if offered is not None:
            offered.close_fd()
        if self.peer is None or offered is None:
            raise RunError("a file that was not offered.")
        keep(partial_of(self.host.config.path / "checkpoint"), self.rank, kind, memoryview(offered.map))

    def registers(self, message: m.Register) -> list[int]:
        """The descriptor of the initial values, if they came."""
        layout = self.layout = message.layout
        if self._initial is None:
            return []
        initial, self._initial = self._initial, None
        if initial.size_bytes != layout.weights_bytes + layout.segment_bytes:
            initial.close_fd()
            raise RunError("the initial values are not those of the model that is registered.")
        return [initial.fd]


def _map(fd: int, access: int) -> memoryview:
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=access))
