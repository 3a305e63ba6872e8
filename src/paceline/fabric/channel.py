"""Small messages between a worker and the store: typed, over a socket that keeps their borders.

`AF_UNIX SOCK_SEQPACKET`: a message arrives whole or not at all, descriptors travel with it, and a
worker that waits for an answer sleeps in the kernel. Decoding is by schema; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from array import array
from typing import Protocol, TypeVar

import msgspec

from paceline.decoding import MessageDecoder
from paceline.errors import RunError

T = TypeVar("T")
LARGEST_BYTES = 8 << 20
INLINE_BYTES = 1 << 16
"""What is longer travels as a memfd."""
FDS = 4
_ROOM = socket.CMSG_LEN(FDS * array("i").itemsize)


class WorkerLine(Protocol):
    """The way to a worker, wherever it is."""

    @property
    def host_number(self) -> int | None:
        """Which host that is; None: this one."""

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send one message, with descriptors if any."""

    def close(self) -> None:
        """End the conversation."""


class Channel:
    """One end of a conversation."""

    host_number = None

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = memoryview(bytearray(2 * INLINE_BYTES))
        """Messages are received and decoded here: new memory for each would cost more than reading it."""
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)

    @classmethod
    def pair(cls) -> tuple[socket.socket, socket.socket]:
        """Two connected ends."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def fileno(self) -> int:
        """For epoll."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct, fds: tuple[int, ...] = ()) -> None:
        """Send one message, with descriptors if any. Large ones travel as a memfd."""
        data = self._encoder.encode(message)
        if len(data) > INLINE_BYTES:
            self._send_large(data, fds)
        elif fds:
            socket.send_fds(self._sock, [data], list(fds))
        else:
            self._sock.send(data)

    def receive(self, decoder: MessageDecoder[T]) -> tuple[T, list[int]] | None:
        """The next message and its descriptors; None when the other end is gone."""
        try:
            size, control, _, _ = self._sock.recvmsg_into([self._buffer], _ROOM)
        except ConnectionResetError:
            return None
        if not size:
            return None
        data: memoryview | bytes = self._buffer[:size]
        fds = _descriptors(control) if control else []
        try:
            if fds and data == LARGE:
                data = _read_all(fds.pop())
            return decoder.decode(data), fds
        except RunError:
            for fd in fds:
                os.close(fd)
            raise

    def wait(self, seconds: float) -> bool:
        """Sleep until there is something to receive, for so long at most; whether there is."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        """End the conversation."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _send_large(self, data: bytes, fds: tuple[int, ...]) -> None:
        carrier = os.memfd_create("paceline-message", os.MFD_CLOEXEC)
        try:
            os.write(carrier, data)
            socket.send_fds(self._sock, [LARGE], [*fds, carrier])
        finally:
            os.close(carrier)


LARGE = b"\xc1"  # a byte msgpack never begins with


def _descriptors(control: list[tuple[int, int, bytes]]) -> list[int]:
    """Those that came along with a message."""
    fds = array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _read_all(fd: int) -> bytes:
    try:
        size = os.fstat(fd).st_size
        if size > LARGEST_BYTES:
            raise RunError(f"a message of {size} bytes; at most {LARGEST_BYTES} are accepted.")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)
