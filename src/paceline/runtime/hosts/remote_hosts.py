"""Workers on other hosts, as the store's loop sees them.

Each host has one session. A worker there is a lane of it, and at this end a `RemoteWorker`, which
stands where a worker of this machine would have its channel: it is handed the same descriptors and
maps the same memory. What arrives for the worker's segment is received straight into it; before a
release it sends the weights, once per host where all workers of a host read one buffer. So
a push and a release look the same to the owner, wherever the worker is.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError, RunError
from paceline.fabric.door import Door, Enter, NotYet
from paceline.fabric.presence import counted_from
from paceline.fabric.session import Session
from paceline.fabric.tls import Seal
from paceline.fabric.wire import parse_address
from paceline.runtime.hosts.host_wire import Lying
from paceline.runtime.hosts.remote_worker import RemoteEvent, RemoteWorker
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import (
    HOST,
    SHARED,
    Belongs,
    Fetched,
    FromHost,
    LendMemory,
    Offer,
    Over,
    VectorStaged,
    Withdraws,
    host_decoder,
)

STARTING_S = 120.0
"""How long the workers of a host may take to start."""
CLOSED_S = 3.0
"""Who closes its connection in good order comes back at once, or has ended: so long it is waited for."""

_encoder = msgspec.msgpack.Encoder()


class RemoteHost:
    """One host: a session, and a lane per worker."""

    def __init__(
        self,
        name: str,
        hear: Callable[[RemoteEvent], None],
        wake: Callable[[], None],
        ranks: tuple[int, ...],
        config: RunConfig,
        number: int = 1,
    ) -> None:
        self.name = name
        self.config = config
        self.number = number
        """Among all hosts that ever came, from 1."""
        self.reach = ""
        """Where other hosts reach it."""
        self.ranks = ranks
        """Ranks that are kept for its workers; empty if they know their own."""
        self.lines: dict[int, RemoteWorker] = {}
        self.equipped = False
        self.version: int | None = None
        self.answer = Lying(0, SHARED, [])
        """The last vector that was sent to one or all of its peers, if it is the same for others."""
        self.newest = 0
        """The highest number of a vector that it was sent."""
        self.away_since: float | None = time.monotonic()
        self.patience_s = self._longest_s = config.host_patience_s
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
        if what == HOST:
            self._of_host(line, host_decoder.decode(data))
        else:
            self._of_worker(line, m.worker_decoder.decode(data))

    def _of_worker(self, line: RemoteWorker, message: m.FromWorker) -> None:
        fds: list[int] = []
        if isinstance(message, m.Hello):
            line.rank, line.pid = message.rank, message.pid
            if message.rank is None and line.lane < len(self.ranks):
                line.rank = self.ranks[line.lane]
        elif isinstance(message, m.Register):
            fds = line.registers(message)
        elif isinstance(message, m.Meet) or line.peer is not None:
            fds = line.known_peer.hears(message)
        self._hear(RemoteEvent(line, message, fds))

    def _of_host(self, line: RemoteWorker, message: FromHost) -> None:
        if isinstance(message, Offer):
            line.offered(message.size_bytes)
        elif isinstance(message, Belongs):
            line.belongs(message.kind)
        elif isinstance(message, Withdraws):
            line.withdrew = True
        elif isinstance(message, LendMemory):
            line.known_peer.lend()
        elif isinstance(message, VectorStaged):
            line.known_peer.stages(message.size_bytes)
        elif isinstance(message, Fetched):
            line.known_peer.arrives()
            self._hear(RemoteEvent(line, message, []))
        else:
            line.gone, line.torn = True, message.torn
            line.withdrawn()
            self._hear(RemoteEvent(line, None, [], message.detail))

    def ended(self) -> None:
        """Its relay has died: it will not be back."""
        self.patience_s = self._longest_s = 0.0
        self.why = "its relay has died"
        if not self.session.connected:
            self.away_since = self.away_since or time.monotonic()
        self._wake()

    @property
    def unfinished(self) -> set[int]:
        """Ranks that were kept for it, but for those whose workers have come to their end."""
        done = {x.rank for x in self.lines.values() if x.closed and not (x.gone or x.withdrew)}
        return set(self.ranks) - {rank for rank in done if rank is not None}

    def lose(self, why: str) -> None:
        """All its workers are lost."""
        for line in [line for line in self.lines.values() if not line.gone]:
            line.gone = line.torn = True
            line.withdrawn()
            self._hear(RemoteEvent(line, None, [], why))

    def _line(self, lane: int) -> RemoteWorker:
        if lane not in self.lines:
            if lane >= SHARED:
                raise RunError(f"lane {lane} is not a worker's.")
            self.lines[lane] = RemoteWorker(self, lane)
        return self.lines[lane]

    def _broken(self, why: str, closed: bool) -> None:
        """Who closes its connection and lives comes back at once; a link that is silent, or was reset, may
        take longer."""
        self.away_since = time.monotonic()
        if self._longest_s:
            self.patience_s, self.why = self._patience(closed), why
        self._wake()

    def _patience(self, closed: bool) -> float:
        if not self.lines:  # it has asked for places, and starts its workers now
            return max(STARTING_S, self._longest_s)
        lines = self.lines.values()
        if closed and any(x.withdrew for x in lines) and all(x.closed or x.gone for x in lines):
            return 0.0
        return min(CLOSED_S, self._longest_s) if closed else self._longest_s


class RemoteHosts:
    """All other hosts. `fileno()` becomes readable when `take()` has something."""

    def __init__(self, config: RunConfig, secret: bytes) -> None:
        """The run's configuration is told to whoever comes, and knows how many are expected."""
        assert config.listen is not None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._heard: deque[RemoteEvent] = deque()
        self._lock = threading.Lock()
        self.hosts: dict[str, RemoteHost] = {}
        self.on_lost: Callable[[RemoteHost, str], None] = lambda host, why: None
        """Told of every host that is given up, before its workers are."""
        self._count = 0
        self._free = set(range(config.near, config.workers))
        self._config = config
        self.closed = ""
        """Why no further host is let in; empty: it is."""
        self._info = msgspec.msgpack.encode(config)
        seal = Seal(config.tls_cert, config.tls_key) if config.tls else None
        self._door = Door(parse_address(config.listen), secret, self._welcome, seal)
        self.address = self._door.address

    def fileno(self) -> int:
        """For the store's epoll."""
        return self._wake

    @property
    def frames(self) -> int:
        """How much has arrived from all hosts: it grows while they have something to say."""
        return sum(host.session.received for host in list(self.hosts.values()))

    def take(self) -> list[RemoteEvent]:
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
            left = counted_from(since) + host.patience_s - time.monotonic()
            if left > 0:
                waits.append(left)
                continue
            self._forget(token, host)
            state = f"out of reach since {host.patience_s:g} s" if host.patience_s else "gone"
            self.on_lost(host, f"{state}: {host.why}")
            host.lose(f"its host {host.name} is {state}: {host.why}")
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
            if asked.ended:
                if host is not None:
                    host.ended()
                raise RunError(f"host {asked.host} is known to be gone.")
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
        ranks = self._places(asked.workers)
        self._count += 1
        return RemoteHost(asked.host, self._hear, self._ring, ranks, self._config, self._count)

    def _places(self, wanted: int) -> tuple[int, ...]:
        if self.closed:
            raise ConfigError(self.closed)
        if wanted > len(self._free):
            places = self._config.workers - self._config.near
            text = (
                f"{wanted} workers would like to join, but of the run's {self._config.workers} places "
                f"{len(self._free)} are free. Start fewer here, or the run with more."
            )
            raise ConfigError(text) if wanted > places else NotYet(text)  # who has a place may lose it
        ranks = tuple(sorted(self._free)[:wanted])
        self._free -= set(ranks)
        return ranks

    def _forget(self, token: str, host: RemoteHost) -> None:
        with self._lock:
            del self.hosts[token]
            self._free |= host.unfinished
        host.session.close()

    def _hear(self, heard: RemoteEvent) -> None:
        self._heard.append(heard)
        self._ring()

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)
