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
from paceline.fabric.wire import HANDSHAKE_S, admit, check_secret, enter, receive_exactly

STRANGERS = 16
"""So many may be at the door at once; further ones are turned away."""
WELCOME = b"\x01"
LAST_WORD_S = 5.0
"""How long the last word of a worker that has ended may be under way."""


class LogBook:
    """Listens until closed, and writes `logs/rankN.log`."""

    def __init__(self, host: str, secret: str, folder: Path, workers: int) -> None:
        self._secret, self._workers = check_secret(secret), workers
        self._folder = folder / "logs"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._listener = socket.create_server((host, 0), backlog=STRANGERS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._lock = threading.Lock()
        self._begun: set[int] = set()
        self.ended: dict[int, float] = {}
        """Whose output is complete, and since when."""
        self._thread = threading.Thread(target=self._accept, name="paceline-logs", daemon=True)
        self._thread.start()

    def settle(self) -> None:
        """All workers have ended: see what they said last written."""
        until = time.monotonic() + LAST_WORD_S
        while self._begun - self.ended.keys() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        """Nobody comes in any more; what is being said is still written."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._guarded, args=(sock,), daemon=True).start()
            else:
                sock.close()

    def _guarded(self, sock: socket.socket) -> None:
        rank = None
        with sock, contextlib.suppress(OSError, RunError):
            try:
                rank = self._let_in(sock)
            finally:
                self._strangers.release()
            if rank is not None:
                self._write(rank, sock)
        if rank is not None:
            self.ended[rank] = time.monotonic()

    def _let_in(self, sock: socket.socket) -> int | None:
        if not admit(sock, self._secret):
            return None
        rank = int.from_bytes(receive_exactly(sock, 4, time.monotonic() + HANDSHAKE_S), "little")
        with self._lock:
            if rank >= self._workers or rank in self._begun:
                return None
            self._begun.add(rank)
        sock.sendall(WELCOME)
        return rank

    def _write(self, rank: int, sock: socket.socket) -> None:
        sock.settimeout(None)
        with (self._folder / f"rank{rank}.log").open("ab", buffering=0) as file:
            while data := sock.recv(1 << 16):
                file.write(data)


def call_home(address: tuple[str, int], secret: str, rank: int) -> socket.socket:
    """A way for a worker's output; whatever is sent there stands in its log."""
    with contextlib.ExitStack() as undone:
        try:
            sock = undone.enter_context(socket.create_connection(address, timeout=HANDSHAKE_S))
            enter(sock, check_secret(secret))
            sock.sendall(rank.to_bytes(4, "little"))
            receive_exactly(sock, len(WELCOME), time.monotonic() + HANDSHAKE_S)
        except (OSError, RunError) as error:
            raise RunError(f"the run that rank {rank} was started for does not want it: {error}") from None
        undone.pop_all()
    sock.settimeout(None)
    return sock
