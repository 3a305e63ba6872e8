"""The serving doctor: answers whoever knows the secret, drops everybody else."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from paceline.doctor.installed import installed_version
from paceline.doctor.wire import (
    ECHO,
    LENGTH,
    MAGIC,
    MOST,
    REQUEST,
    SECONDS,
    address_of,
    drain,
    flood,
    receive,
)
from paceline.errors import ConfigError
from paceline.fabric.wire import admit

MOST_CONNECTIONS = 16


class LinkSide(msgspec.Struct, frozen=True):
    """What one side says of itself."""

    host: str
    cores: int
    python: str
    paceline: str | None
    torch: str | None


def this_side() -> LinkSide:
    """The host this runs on."""
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    versions = installed_version("paceline"), installed_version("torch")
    return LinkSide(socket.gethostname(), cores, python, *versions)


class LinkServer:
    """Listens from the start; `serve` answers until it is stopped, or one peer has been measured."""

    def __init__(self, address: str, secret: bytes, say: Callable[[str], None] = lambda text: None) -> None:
        host, port = address_of(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {host}:{port}: {error.strerror or error}. "
                "Give an address of this host, and a port that is free."
            ) from None
        self.port: int = self._listener.getsockname()[1]
        self.served = 0
        self._secret = secret
        self._say = say
        self._seats = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._quiet = threading.Lock()
        self._done = threading.Event()

    def serve(self, once: bool = False) -> None:
        """Answer peers, each in a thread of its own so that a slow stranger keeps nobody waiting."""
        with self._listener as listener:
            listener.settimeout(0.1)
            while not self._done.is_set():
                with contextlib.suppress(TimeoutError):
                    self._seat(*listener.accept(), once)

    def stop(self) -> None:
        """Let `serve` return soon."""
        self._done.set()

    def _seat(self, connection: socket.socket, peer: tuple[str, int], once: bool) -> None:
        if not self._seats.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._meet, args=(connection, peer[0], once), daemon=True).start()

    def _meet(self, connection: socket.socket, peer: str, once: bool) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not admit(connection, self._secret, MAGIC):
                    self._say(f"{peer} does not know the secret, refused")
                    return
                with self._quiet:  # one at a time, or they would measure one another
                    self._say(f"measuring with {peer}")
                    answer_all(connection)
                self.served += 1
                if once:
                    self._done.set()
        finally:
            self._seats.release()


def answer_all(connection: socket.socket) -> None:
    """Answer until the peer says that it is done."""
    while True:
        kind, size = REQUEST.unpack(receive(connection, REQUEST.size))
        if kind == b"DONE" or size > MOST or kind not in ANSWERS:
            return
        ANSWERS[kind](connection, size)


def _echo(connection: socket.socket, size: int) -> None:
    connection.sendall(receive(connection, ECHO))


def _time(connection: socket.socket, size: int) -> None:
    connection.sendall(SECONDS.pack(time.time()))


def _sink(connection: socket.socket, size: int) -> None:
    drain(connection, size)
    connection.sendall(b"!")


def _info(connection: socket.socket, size: int) -> None:
    text = msgspec.json.encode(this_side())
    connection.sendall(LENGTH.pack(len(text)) + text)


ANSWERS: dict[bytes, Callable[[socket.socket, int], None]] = {
    b"ECHO": _echo,
    b"TIME": _time,
    b"SINK": _sink,
    b"SEND": flood,
    b"INFO": _info,
}
