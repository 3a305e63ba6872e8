"""Both ends of a session in one process, on a connection that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading

from paceline.errors import RunError
from paceline.fabric.dialer import Dialer
from paceline.fabric.door import Door, Enter
from paceline.fabric.session import Session
from paceline.fabric.tls import Seal, Trust
from paceline.fabric.wire import check_secret

SECRET = check_secret("a secret of more than sixteen characters")


class Notebook:
    """Remembers what arrived, and has memory for lanes."""

    def __init__(self, size: int) -> None:
        self.memory = {lane: bytearray(size) for lane in range(4)}
        self.messages: list[tuple[int, bytes]] = []
        self.seen: list[bytes] = []
        self.more = threading.Condition()

    def place(self, lane: int, what: int, offset: int, length: int) -> memoryview:
        if offset + length > len(self.memory[lane]):
            raise RunError("too much")
        return memoryview(self.memory[lane])[offset : offset + length]

    def arrived(self, lane: int, what: int, data: bytes) -> None:
        with self.more:
            self.messages.append((lane, data))
            self.seen.append(bytes(self.memory[lane][-8:]))
            self.more.notify_all()

    def wait(self, count: int) -> None:
        with self.more:
            assert self.more.wait_for(lambda: len(self.messages) >= count, 30), self.messages


class Ends:
    """A door with one session behind it, and who calls."""

    def __init__(self, size: int, seal: Seal | None = None, trust: Trust | None = None) -> None:
        self.here, self.there = Notebook(size), Notebook(size)
        self.session = Session(self.here, lambda why, closed: None)
        self.door = Door(("127.0.0.1", 0), SECRET, lambda asked: (self.session, b"letter"), seal)
        self.gave_up: list[str] = []
        hello = Enter("one", "test")
        self.dialer = Dialer(self.door.address, SECRET, hello, self.there, self.gave_up.append, 10, trust)
        assert self.dialer.open() == b"letter"

    def cut(self) -> None:
        sock = self.dialer.session._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the other end may have been faster
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.dialer.close()
        self.door.close()
        self.session.close()
