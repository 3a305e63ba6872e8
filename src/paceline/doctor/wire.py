"""Bytes between two doctors: fixed lengths, deadlines, and nothing that is trusted.

After the handshake the client asks, the server answers. A request is a kind and a size:

    ECHO 16     16 bytes follow and come back          the way there and back
    TIME 0      8 bytes come back: seconds since 1970  the other clock
    SINK n      n bytes follow, 1 comes back           speed there
    SEND n      n bytes come back                      speed back
    INFO 0      4 bytes of length and a JSON document  versions

Sizes are checked before anything is read, and no buffer is ever as large as a size says.
"""

from __future__ import annotations

import socket
import struct
import time

from paceline.errors import RunError
from paceline.fabric.wire import parse_address

PORT = 29471
MAGIC = b"paceline-doctor\n"
CHUNK = 1 << 18
MOST = 1 << 33
"""Bytes of one transfer."""
MOST_INFO = 1 << 14
REQUEST = struct.Struct(">4sQ")
SECONDS = struct.Struct(">d")
LENGTH = struct.Struct(">I")
ECHO = 16
PATIENCE_S = 5.0
"""For a connection to come about."""
SILENCE_S = 20.0
"""Who says nothing for so long is gone."""


class Deadline:
    """A time by which all that was asked for must have come, however slowly it drips."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end

    def left(self) -> float:
        """Seconds left; raises when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side is too slow")
        return left


def receive(connection: socket.socket, size: int, seconds: float = SILENCE_S) -> bytes:
    """Exactly so many bytes, within a time for all of them."""
    deadline, data = Deadline(seconds), bytearray()
    while len(data) < size:
        connection.settimeout(deadline.left())
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        data += part
    return bytes(data)


def drain(connection: socket.socket, size: int) -> None:
    """Read so many bytes and forget them."""
    buffer = memoryview(bytearray(CHUNK))
    connection.settimeout(SILENCE_S)
    while size > 0:
        count = connection.recv_into(buffer[: min(size, CHUNK)])
        if not count:
            raise ConnectionError("the other side has closed the connection")
        size -= count


def flood(connection: socket.socket, size: int) -> None:
    """Send so many bytes of no meaning."""
    block = memoryview(bytes(CHUNK))
    connection.settimeout(SILENCE_S)
    while size > 0:
        connection.sendall(block[: min(size, CHUNK)])
        size -= CHUNK


def address_of(text: str) -> tuple[str, int]:
    """host, host:port or [v6 address]:port."""
    return parse_address(text, PORT)


def connect(text: str) -> socket.socket:
    """A connection to a doctor that serves, or is about to: both may be started at once."""
    host, port = address_of(text)
    try:
        connection = _patiently((host, port), Deadline(PATIENCE_S))
    except OSError as error:
        raise RunError(
            f"no doctor answers at {host}:{port}: {error.strerror or error}. "
            f"Start one there: paceline doctor --serve {host}. If it runs, a firewall stands between."
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _patiently(target: tuple[str, int], deadline: Deadline) -> socket.socket:
    while True:
        try:
            return socket.create_connection(target, timeout=deadline.left())
        except ConnectionRefusedError as error:
            time.sleep(0.1)
            if deadline.over():
                raise error from None
