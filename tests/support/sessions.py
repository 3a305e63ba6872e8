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
from paceline.fabric.wire import PIECE_BYTES, check_secret

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

    def check_a_push(self) -> None:
        """Memory arrives before the message that speaks of it."""
        size = len(self.here.memory[1])
        data = memoryview(bytes(i % 251 for i in range(size)))
        self.dialer.session.send_memory(1, 0, data, 0, size)
        self.dialer.session.send(1, b"pushed")
        self.here.wait(1)
        assert self.here.messages == [(1, b"pushed")]
        assert self.here.memory[1] == data
        assert self.here.seen == [bytes(data[-8:])]

    def check_a_conversation(self, script: list[str]) -> None:
        """Every frame arrives exactly once and in order, both ways, whatever is cut."""
        sent: dict[str, list[tuple[int, bytes]]] = {"here": [], "there": []}
        for number, act in enumerate(script):
            if act == "cut":
                self.cut()
            elif act == "tensor":
                data = memoryview(bytes([number % 256]) * (2 * PIECE_BYTES + 17))
                self.dialer.session.send_memory(1, 0, data, 0, len(data))
            else:
                session = self.session if act == "here" else self.dialer.session
                sent[act].append((1, b"%d" % number))
                session.send(1, b"%d" % number)
        self.here.wait(len(sent["there"]))
        self.there.wait(len(sent["here"]))
        assert self.dialer.session.drain(20)
        assert self.session.drain(20)
        assert self.here.messages == sent["there"]
        assert self.there.messages == sent["here"]
        assert not self.gave_up

    def cut(self) -> None:
        sock = self.dialer.session._sock
        if sock is not None:
            with contextlib.suppress(OSError):  # the other end may have been faster
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.dialer.close()
        self.door.close()
        self.session.close()
