"""A conversation between two hosts that outlives its connection.

Every frame has a number (by order). The sender keeps what was not acknowledged, and when a cut
link is back both ends tell how far they had heard: the rest is sent again, so each frame arrives
exactly once and in order, whatever happened to the connection. Pieces of tensors are kept as
references to their memory, which nobody changes before the other end has answered: a worker sleeps
until it is released, and the store keeps a worker's weights as they are until its next push.

Each lane (a worker) has a queue of its own, and lanes take turns piece by piece: a batch drawn by
one worker never waits behind the hundred megabytes of another. One thread reads, one writes; both
sleep in the kernel. Pieces are received straight into the memory they belong to. What finds nothing
before it is sent by whoever brings it, as far as the kernel takes it without waiting: waking the thread
that writes takes longer than a small message. The rest is that thread's.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from paceline.errors import PacelineError
from paceline.fabric.wire import (
    ACK,
    ALIGNMENT,
    CONTROL,
    DATA,
    HEADER,
    PIECE_BYTES,
    Connection,
    fill_up,
    read_header,
)

HEARTBEAT_S = 1.0
"""How often something is said even if there is nothing to say."""
SILENCE_MS = 5000
"""After so long without an acknowledgement the kernel gives a connection up."""
ACK_EVERY = 32
"""Numbered frames after which an acknowledgement does not wait for company."""
TCP_NOTSENT_LOWAT = 25
UNSENT_BYTES = 1 << 20
ANSWER, PLEASE_ANSWER = 1, 2
FILL = memoryview(bytes(ALIGNMENT))
CLOSED = (errno.EPIPE,)
"""What a connection says that the other end has closed. A reset is none of it: whoever stands in between can
send one."""


class Sink(Protocol):
    """Who receives. Called by the reading thread, in order."""

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        """The memory a piece belongs to; raises to refuse."""

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        """A message."""


class Outgoing(NamedTuple):
    """A message, or a stretch of memory."""

    kind: int
    what: int
    lane: int
    data: memoryview
    offset: int


SIGN_OF_LIFE = Outgoing(ACK, 0, 0, memoryview(b""), 0)


class Session:
    """One end."""

    def __init__(self, sink: Sink, broken: Callable[[str, bool], None]) -> None:
        """`broken` is told, by a thread of the session, why its connection is gone, and whether the other
        end closed it in good order (its process has ended, or comes back at once). It may come back."""
        self._sink = sink
        self._broken = broken
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        """There is something for the thread that writes."""
        self._emptied = threading.Condition(lock)
        """The other end has had everything."""
        self._pen = threading.Lock()
        """Held by whoever writes, from choosing a frame to its last byte; taken before the others."""
        self._begun: deque[memoryview] = deque()
        """What is left of a frame that was begun."""
        self._swap = threading.RLock()
        """Held while connections are exchanged; never by the threads that read and write."""
        self._lanes: dict[int, deque[Outgoing]] = {}
        self._turn: deque[int] = deque()
        """Lanes with something to send, the next first."""
        self._unheard: deque[Outgoing] = deque()
        self._again: deque[Outgoing] = deque()
        self._heard = 0
        """Of our frames, how many the other end has acknowledged."""
        self._acknowledged = 0
        self.received = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self._sock: Connection | None = None
        self._used: Connection | None = None
        """The last connection, also when it is broken: to be closed when nobody reads from it any more."""
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.impossible = ""
        """What the other end said that cannot be; the session is over then."""
        self._urgent = 0
        """Whether an acknowledgement is due at once: ours, or theirs."""

    # -- what is to be sent -------------------------------------------------------------------

    def send(self, lane: int, data: bytes, what: int = 0, queue: int | None = None) -> None:
        """Send a message, after what is in its queue already (that of its lane, unless named)."""
        self._put(lane if queue is None else queue, Outgoing(CONTROL, what, lane, memoryview(data), 0))

    def send_memory(
        self, lane: int, what: int, memory: memoryview, start: int, stop: int, queue: int | None = None
    ) -> None:
        """Send a stretch of memory. It must not change until the other end has answered."""
        if stop > start:
            stretch = Outgoing(DATA, what, lane, memory[start:stop], start)
            self._put(lane if queue is None else queue, stretch)

    def _put(self, queue: int, item: Outgoing) -> None:
        with self._changed:
            if self._closed:  # nobody will ever send it
                return
            idle = self._sock is not None and not (self._turn or self._again or self._begun)
            waiting = self._lanes.setdefault(queue, deque())
            if not waiting:
                self._turn.append(queue)
            waiting.append(item)
        if idle and self._pen.acquire(blocking=False):
            try:
                self._write_at_once()
            finally:
                self._pen.release()
        with self._changed:  # also what somebody else brought while we had the pen
            if self._something:
                self._changed.notify()

    def drain(self, timeout_s: float) -> bool:
        """Wait until the other end has everything; whether it has."""
        with self._changed:
            self._urgent = max(self._urgent, PLEASE_ANSWER)
            self._changed.notify()
            return self._emptied.wait_for(lambda: not (self._turn or self._again or self._unheard), timeout_s)

    @property
    def heard(self) -> int:
        """How many of our frames the other end has."""
        return self._heard

    # -- connections come and go --------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether there is a connection now."""
        return self._sock is not None

    def attach(self, sock: Connection, heard: int) -> None:
        """Go on over this connection; the other end has had so many of our frames."""
        with self._swap:
            self.detach()
            if self._closed or self.impossible:
                sock.close()
            else:
                self._go_on(sock, heard)

    def _go_on(self, sock: Connection, heard: int) -> None:
        prepare(sock)
        with self._changed:
            self._hear(heard)
            self._again = deque(self._unheard)
            self._unheard.clear()
            self._begun.clear()
            self._sock = self._used = sock
        targets = (self._read, self._write)
        self._threads = [threading.Thread(target=run, args=(sock,), daemon=True) for run in targets]
        for thread in self._threads:
            thread.start()

    def detach(self) -> None:
        """Give the present connection up, and wait until nobody reads from it any more."""
        with self._swap:
            self._drop(self._sock)
            for thread in self._threads:
                thread.join()
            self._threads = []
            if self._used is not None:
                with self._pen:  # somebody may be sending right now
                    self._used.close()
                self._used = None
            with self._changed:  # what was to be sent again, but was not yet: keep the order
                self._unheard.extend(self._again)
                self._again.clear()

    def close(self) -> None:
        """The end; not to be revived."""
        self._closed = True
        self.detach()

    def _drop(self, sock: Connection | None) -> bool:
        """Whether it was the present connection, which is gone now."""
        if sock is None:
            return False
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        with self._changed:
            mine, self._sock = self._sock is sock, None if self._sock is sock else self._sock
            self._changed.notify()
        return mine

    def _lost(self, sock: Connection, error: Exception | None) -> None:
        if self._drop(sock) and not self._closed:
            why = "its connection ended" if error is None else f"its connection broke ({error})"
            self._broken(why, not isinstance(error, OSError) or error.errno in CLOSED)

    # -- reading ------------------------------------------------------------------------------

    def _read(self, sock: Connection) -> None:
        head, skip = memoryview(bytearray(HEADER.size + ALIGNMENT)), 0
        reason: Exception | None = None
        try:
            while _fill(sock, head[: skip + HEADER.size]):
                header = read_header(head[skip : skip + HEADER.size])
                if not self._take(sock, *header):
                    break
                skip = fill_up(header.length)
        except OSError as error:
            reason = error
        except PacelineError as error:  # it would say the same again: there is no way to go on
            self.impossible = str(error)
            reason = error
        finally:
            self._lost(sock, reason)

    def _take(
        self, sock: Connection, kind: int, what: int, lane: int, length: int, offset: int, ack: int
    ) -> bool:
        if kind == DATA:
            if not _fill(sock, self._sink.place(lane, what, offset, length)):
                return False
        elif kind == CONTROL:
            data = bytearray(length)
            if not _fill(sock, memoryview(data)):
                return False
            self._sink.arrived(lane, what, bytes(data))
        with self._changed:
            self._hear(ack)
            self.received += kind != ACK
            self.received_bytes += HEADER.size + length + fill_up(length)
            if kind == ACK and what == PLEASE_ANSWER:
                self._urgent = max(self._urgent, ANSWER)
                self._changed.notify()
            if self.received - self._acknowledged >= ACK_EVERY:
                self._changed.notify()
        return True

    def _hear(self, ack: int) -> None:
        while self._heard < ack and self._unheard:
            self._unheard.popleft()
            self._heard += 1
        if not self._unheard:
            self._emptied.notify_all()

    # -- writing ------------------------------------------------------------------------------

    def _write(self, sock: Connection) -> None:
        reason: Exception | None = None
        try:
            while self._sock is sock:
                with self._changed:
                    self._changed.wait_for(lambda: self._sock is not sock or self._something, HEARTBEAT_S)
                with self._pen:
                    if self._begun or self._begin(sock):
                        self._continue(sock)
        except OSError as error:
            reason = error
        finally:
            self._lost(sock, reason)

    def _write_at_once(self) -> None:
        """One frame, or as much of it as the kernel takes. That a connection broke is noticed elsewhere."""
        sock = self._sock
        with contextlib.suppress(OSError):
            if sock is not None and self._something and not self._begun and self._begin(sock):
                self._continue(sock, socket.MSG_DONTWAIT)

    def _begin(self, sock: Connection) -> bool:
        """Choose what to send now: what was lost, what is new, or a sign of life."""
        with self._changed:
            if self._sock is not sock:
                return False
            kind, what, lane, data, offset = self._choose()
            self._acknowledged = self.received
            fill = fill_up(len(data))
            head = HEADER.pack(kind, what, lane, len(data), offset, self.received)
            self._begun.extend((memoryview(head), data, FILL[:fill]))
            self.sent_bytes += HEADER.size + len(data) + fill
            return True

    def _choose(self) -> Outgoing:
        if self._urgent:
            item, self._urgent = SIGN_OF_LIFE._replace(what=self._urgent), 0
            return item
        if not (self._again or self._turn):
            return SIGN_OF_LIFE
        item = self._again.popleft() if self._again else self._first_piece()
        self._unheard.append(item)
        return item

    def _continue(self, sock: Connection, flags: int = 0) -> None:
        """Put what was begun on the wire, all of it if it may wait."""
        while self._begun:
            sent = sock.sendmsg(self._begun, (), flags)
            while self._begun and sent >= len(self._begun[0]):
                sent -= len(self._begun.popleft())
            if self._begun:
                self._begun[0] = self._begun[0][sent:]
                if flags:
                    return

    @property
    def _something(self) -> bool:
        due = self.received - self._acknowledged >= ACK_EVERY
        return due or bool(self._begun or self._again or self._turn or self._urgent)

    def _first_piece(self) -> Outgoing:
        """A piece of the lane whose turn it is; then it is another's turn."""
        lane = self._turn.popleft()
        waiting = self._lanes[lane]
        item = waiting.popleft()
        kind, what, number, data, offset = item
        if kind == DATA and len(data) > PIECE_BYTES:
            rest = Outgoing(kind, what, number, data[PIECE_BYTES:], offset + PIECE_BYTES)
            waiting.appendleft(rest)
            item = Outgoing(kind, what, number, data[:PIECE_BYTES], offset)
        if waiting:
            self._turn.append(lane)
        return item


def prepare(sock: Connection) -> None:
    """A connection for messages and tensors: prompt, with little unsent, and not silent for ever."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_MS)
    sock.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, UNSENT_BYTES)


def _fill(sock: Connection, memory: memoryview) -> bool:
    """Read until the memory is full; False when the connection ended before."""
    while memory:
        count = sock.recv_into(memory, len(memory), socket.MSG_WAITALL)
        if count == 0:
            return False
        memory = memory[count:]
    return True
