"""Workers on other hosts, as the store's loop sees them.

Each host has one session. A worker there is a lane of it, and at this end a `RemoteLine`, which
stands where a worker of this machine would have its channel: it is handed the same descriptors and
maps the same memory. What arrives for the worker's segment is received straight into it; before a
release it sends the weights, once per host where all workers of a host read one buffer. So
the owner of the store never learns that a worker is elsewhere.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError, RunError
from paceline.fabric.door import Door, Enter
from paceline.fabric.segment import Segment
from paceline.fabric.session import Session
from paceline.fabric.wire import parse_address
from paceline.runtime import messages as m
from paceline.runtime.portions import Plan
from paceline.store.layout import Layout

WORKER, HOST = 0, 1
"""Who speaks in a message: a worker (or the store to it), or its host."""
SEGMENT, WEIGHTS, INITIAL = 0, 1, 2
"""The memories of a lane."""
STARTING_S = 120.0
"""How long the workers of a host may take to start."""
SHARED = 0xFFFF
"""The lane of what all workers of a host share."""
CLOSED_S = 3.0
"""Who closes its connection itself comes back at once, or has ended: so long it is waited for."""

_encoder = msgspec.msgpack.Encoder()


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A host is about to send its worker's initial values."""

    size_bytes: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A worker of the host is gone."""

    detail: str
    torn: bool = False
    """Whether pieces of what it pushed may never arrive."""


class Equip(msgspec.Struct, frozen=True, tag=True):
    """A worker's memory is about to arrive: make room."""

    shared: bool


class Dismissed(msgspec.Struct, frozen=True, tag=True):
    """The store has no more to say to this worker."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """The run is over; it is of no use to come back."""


FromHost = Offer | Gone
ToHost = Equip | Dismissed | Over | Plan
host_decoder: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)
guest_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


class Heard(NamedTuple):
    """Something for the loop: a message of a worker, or (None) that it is gone."""

    line: RemoteLine
    message: m.FromWorker | None
    fds: list[int]
    detail: str = ""


class RemoteLine:
    """The way to one worker on another host; what it is given here, it passes on."""

    def __init__(self, host: RemoteHost, lane: int) -> None:
        self.host = host
        self.lane = lane
        self.rank: int | None = None
        self.pid = 0
        self.layout: Layout | None = None
        self.plan: Plan | None = None
        """Who holds which portion of the weights, if it is not all here."""
        self._initial: Segment | None = None
        self._shared = False
        self._segment: memoryview | None = None
        self._weights: memoryview | None = None
        self._version: int | None = None
        self.gone = False
        """Whether its host has told that it is gone, or is gone itself."""
        self.torn = False
        """Whether pieces of what it pushed may never arrive."""
        self.closed = False

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send a message, after the memory it speaks of."""
        session = self.host.session
        if isinstance(message, m.Ready):
            self._equip(message, fds)
        elif isinstance(message, m.Release):
            self._send_weights(message.version)
        queue = SHARED if self._shared and isinstance(message, m.Ready | m.Release) else None
        session.send(self.lane, _encoder.encode(message), WORKER, queue)

    def close(self) -> None:
        """The store is done with this worker."""
        if not self.closed:
            self.closed = True
            self.host.session.send(self.lane, _encoder.encode(Dismissed()), HOST)

    def _equip(self, ready: m.Ready, fds: tuple[int, ...]) -> None:
        if len(fds) != 2:
            raise ConfigError(
                "peer protocols do not work through a store, so workers of other hosts cannot take part this "
                "way. Use a paced protocol (ssp, dssp, ...)."
            )
        assert self.layout is not None, "a worker registers before it is equipped"
        self._segment, self._weights = _map(fds[0], mmap.ACCESS_WRITE), _map(fds[1], mmap.ACCESS_READ)
        self._shared = ready.shared
        session, queue = self.host.session, SHARED if ready.shared else None
        if self.plan is not None:
            session.send(self.lane, _encoder.encode(self.plan), HOST, queue)
        session.send(self.lane, _encoder.encode(Equip(ready.shared)), HOST, queue)
        buffers = self.layout.gradient_end
        session.send_memory(self.lane, SEGMENT, self._segment, buffers, len(self._segment), queue)
        if not ready.shared or not self.host.equipped:
            lane = SHARED if ready.shared else self.lane
            for start, stop in [(0, len(self._weights))] if self.plan is None else self.plan.first_spans:
                session.send_memory(lane, WEIGHTS, self._weights, start, stop, queue)
            self.host.equipped = ready.shared

    def _send_weights(self, version: int) -> None:
        """What training moves, unless this version is there already."""
        assert self.layout is not None
        assert self._weights is not None
        known = self.host.version if self._shared else self._version
        if known == version:
            return
        self._version = self.host.version = version
        lane = SHARED if self._shared else self.lane
        spans = [(region.weights, region.weights + region.size_bytes) for region in self.layout.regions]
        for start, stop in spans if self.plan is None else self.plan.first_spans[:1]:
            self.host.session.send_memory(lane, WEIGHTS, self._weights, start, stop, lane)

    # -- called by the session's reading thread ------------------------------------------------

    def place(self, what: int, offset: int, length: int) -> memoryview:
        """Where a piece that arrives belongs."""
        memory = self._segment
        if what == INITIAL:
            memory = memoryview(self._initial.map) if self._initial is not None else None
        if what == WEIGHTS or memory is None or offset + length > len(memory):
            raise RunError(f"{length} bytes at {offset} for a memory that was not agreed on.")
        return memory[offset : offset + length]

    def offered(self, size_bytes: int) -> None:
        """Make room for the initial values."""
        self._initial = Segment.create(size_bytes, "initial weights")

    def registers(self, message: m.Register) -> list[int]:
        """The descriptor of the initial values, if they came."""
        layout = self.layout = message.layout
        if self._initial is None:
            return []
        initial, self._initial = self._initial, None
        if initial.size_bytes != layout.weights_bytes + layout.segment_bytes:
            raise RunError("the initial values are not those of the model that is registered.")
        return [initial.fd]


class RemoteHost:
    """One host: a session, and a lane per worker."""

    def __init__(
        self,
        name: str,
        hear: Callable[[Heard], None],
        wake: Callable[[], None],
        ranks: tuple[int, ...],
        patience_s: float,
        number: int = 1,
    ) -> None:
        self.name = name
        self.number = number
        """Among all hosts that ever came, from 1."""
        self.reach = ""
        """Where other hosts reach it."""
        self.ranks = ranks
        """Ranks that are kept for its workers; empty if they know their own."""
        self.lines: dict[int, RemoteLine] = {}
        self.equipped = False
        self.version: int | None = None
        self.away_since: float | None = time.monotonic()
        self.patience_s = self._longest_s = patience_s
        self.why = "it never came"
        self._hear = hear
        self._wake = wake
        self.session = Session(self, self._broken)

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        """A piece arrives."""
        return self._line(lane).place(what, offset, length)

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """A message arrives. What cannot be decoded ends the connection, not the run."""
        self.away_since = None
        line = self._line(lane)
        try:
            if what == HOST:
                self._of_host(line, host_decoder.decode(data))
            else:
                self._of_worker(line, m.worker_decoder.decode(data))
        except msgspec.DecodeError as error:
            raise RunError(f"a message of {len(data)} bytes that is not ours: {error}") from None

    def _of_worker(self, line: RemoteLine, message: m.FromWorker) -> None:
        fds: list[int] = []
        if isinstance(message, m.Hello):
            line.rank, line.pid = message.rank, message.pid
            if message.rank is None and line.lane < len(self.ranks):
                line.rank = self.ranks[line.lane]
        elif isinstance(message, m.Register):
            fds = line.registers(message)
        self._hear(Heard(line, message, fds))

    def _of_host(self, line: RemoteLine, message: FromHost) -> None:
        if isinstance(message, Offer):
            line.offered(message.size_bytes)
        else:
            line.gone, line.torn = True, message.torn
            self._hear(Heard(line, None, [], message.detail))

    @property
    def unfinished(self) -> set[int]:
        """Ranks that were kept for it, but for those whose workers have come to their end."""
        done = {line.rank for line in self.lines.values() if line.closed and not line.gone}
        return set(self.ranks) - {rank for rank in done if rank is not None}

    def lose(self, why: str) -> None:
        """All its workers are lost."""
        for line in [line for line in self.lines.values() if not line.gone]:
            line.gone = line.torn = True
            self._hear(Heard(line, None, [], why))

    def _line(self, lane: int) -> RemoteLine:
        if lane not in self.lines:
            if lane >= SHARED:
                raise RunError(f"lane {lane} is not a worker's.")
            self.lines[lane] = RemoteLine(self, lane)
        return self.lines[lane]

    def _broken(self, why: str, closed: bool) -> None:
        """Who closes its connection and lives comes back at once; a silent link may be cut."""
        self.patience_s = min(CLOSED_S, self._longest_s) if closed else self._longest_s
        if not self.lines:  # it has asked for places, and starts its workers now
            self.patience_s = max(STARTING_S, self._longest_s)
        self.away_since, self.why = time.monotonic(), why
        self._wake()


class Guests:
    """All other hosts. `fileno()` becomes readable when `take()` has something."""

    def __init__(self, config: RunConfig, secret: bytes) -> None:
        """The run's configuration is told to whoever comes, and knows how many are expected."""
        assert config.listen is not None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._heard: deque[Heard] = deque()
        self._lock = threading.Lock()
        self.hosts: dict[str, RemoteHost] = {}
        self.on_lost: Callable[[RemoteHost, str], None] = lambda host, why: None
        """Told of every host that is given up, before its workers are."""
        self._count = 0
        self._free = set(range(config.near, config.workers))
        self._config = config
        self._info = msgspec.msgpack.encode(config)
        self._door = Door(parse_address(config.listen), secret, self._welcome)
        self.address = self._door.address

    def fileno(self) -> int:
        """For the store's epoll."""
        return self._wake

    def take(self) -> list[Heard]:
        """What was heard since the last call, in order."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return []
        return [self._heard.popleft() for _ in range(len(self._heard))]

    def overdue(self) -> float | None:
        """Give up hosts that are out of reach for too long; how long to wait for the next one."""
        waits = []
        for token, host in list(self.hosts.items()):
            since = host.away_since
            if since is None or host.session.connected:
                continue
            left = since + host.patience_s - time.monotonic()
            if left > 0:
                waits.append(left)
                continue
            self._forget(token, host)
            self.on_lost(host, f"out of reach since {host.patience_s:g} s: {host.why}")
            host.lose(f"its host {host.name} is out of reach since {host.patience_s:g} s: {host.why}")
        return min(waits, default=None)

    def close(self, drain_s: float = 2.0) -> None:
        """Let everybody hear the last word, then hang up."""
        self._door.close()
        until = time.monotonic() + drain_s
        for host in self.hosts.values():
            host.session.send(SHARED, _encoder.encode(Over()), HOST)
            if host.session.connected:
                host.session.drain(max(0.0, until - time.monotonic()))
            host.session.close()
        os.close(self._wake)

    def _welcome(self, asked: Enter) -> tuple[Session, bytes]:
        with self._lock:
            host = self.hosts.get(asked.session)
            if host is not None and host.session.impossible:
                raise RunError(f"host {asked.host} said what cannot be: {host.session.impossible}")
            if host is None:
                if asked.received:
                    raise RunError(
                        f"the run does not know host {asked.host} any more; it was away for too long."
                    )
                host = self._host(asked)
                self.hosts[asked.session] = host
            host.reach = asked.reach or host.reach
            return host.session, msgspec.msgpack.encode((self._info, host.ranks))

    def _host(self, asked: Enter) -> RemoteHost:
        ranks, patience_s = self._places(asked.workers), self._config.host_patience_s
        self._count += 1
        return RemoteHost(asked.host, self._hear, self._ring, ranks, patience_s, self._count)

    def _places(self, wanted: int) -> tuple[int, ...]:
        if wanted > len(self._free):
            raise ConfigError(
                f"{wanted} workers would like to join, but of the run's {self._config.workers} places "
                f"{len(self._free)} are free. Start fewer here, or the run with more."
            )
        ranks = tuple(sorted(self._free)[:wanted])
        self._free -= set(ranks)
        return ranks

    def _forget(self, token: str, host: RemoteHost) -> None:
        with self._lock:
            del self.hosts[token]
            self._free |= host.unfinished
        host.session.close()

    def _hear(self, heard: Heard) -> None:
        self._heard.append(heard)
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)


def _map(fd: int, access: int) -> memoryview:
    return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=access))
