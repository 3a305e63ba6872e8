"""What workers elsewhere print comes back into the run's folder, as it is printed.

A worker's host connects, proves that it knows the run's secret, and says whose output follows. Each rank
comes once: whoever starts a worker a second time, unasked, is turned away.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

from paceline.errors import RunError
from paceline.fabric.listener import Listener
from paceline.fabric.tls import Seal, Trust, go_in
from paceline.fabric.wire import HANDSHAKE_S, Connection, check_secret, receive_exactly

WELCOME = b"\x01"
LAST_WORD_S = 5.0
"""How long the last word of a worker that has ended may be under way."""


class LogBook:
    """Listens until closed, and writes `logs/rankN.log`."""

    def __init__(self, host: str, secret: str, folder: Path, workers: int, seal: Seal | None = None) -> None:
        self._workers = workers
        self._folder = folder / "logs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self.ended: dict[int, float] = {}
        """Whose output is complete, and since when."""
        self._listener = Listener((host, 0), check_secret(secret), self._come_in, seal)
        self.address = self._listener.address

    def settle(self) -> None:
        """All workers have ended: see what they said last written."""
        until = time.monotonic() + LAST_WORD_S
        while self._begun - self.ended.keys() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Nobody comes in any more; what is being said is still written."""
        self._listener.close()

    def _come_in(self, sock: Connection) -> bool:
        rank = self._whose(sock)
        if rank is not None:
            try:
                self._write(rank, sock)
            finally:
                self.ended[rank] = time.monotonic()
        return False

    def _whose(self, sock: Connection) -> int | None:
        """A rank that has not come before."""
        rank = int.from_bytes(receive_exactly(sock, 4, time.monotonic() + HANDSHAKE_S), "little")
        with self._lock:
            if rank >= self._workers or rank in self._begun:
                return None
            self._begun.add(rank)
        sock.sendall(WELCOME)
        return rank

    def _write(self, rank: int, sock: Connection) -> None:
        sock.settimeout(None)
        with (self._folder / f"rank{rank}.log").open("ab", buffering=0) as file:
            while data := sock.recv(1 << 16):
                file.write(data)


def call_home(address: tuple[str, int], secret: str, rank: int, trust: Trust | None = None) -> Connection:
    """A way for a worker's output; whatever is sent there stands in its log."""
    with contextlib.ExitStack() as undone:
        try:
            sock = undone.enter_context(socket.create_connection(address, timeout=HANDSHAKE_S))
            home = go_in(sock, check_secret(secret), address[0], trust)
            home.sendall(rank.to_bytes(4, "little"))
            receive_exactly(home, len(WELCOME), time.monotonic() + HANDSHAKE_S)
        except (OSError, RunError) as error:
            raise RunError(f"the run did not accept rank {rank}: {error}") from None
        undone.pop_all()
    home.settimeout(None)
    return home
