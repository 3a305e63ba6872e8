"""A second host for tests: an engine of its own, behind a wire that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.engines.control import Ended
from paceline.engines.hosting import enrol
from paceline.engines.local import LocalEngine
from paceline.fabric.tls import Trust
from support.runs import LONGEST_S, Lab, Run, Running, children, wait_until

SECRET = "the secret of a run in the tests"


class Wire:
    """Forwards connections to an address, until they are cut; then the next one is forwarded."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.connections = 0
        self.there_bytes = self.back_bytes = 0
        """What went to that address, and what came from it."""
        self._start(self._accept)
        self._lock = threading.Lock()
        self._sizes: Iterator[int] = iter(())
        self._left: int | None = None

    def cut_after(self, sizes: Iterable[int]) -> None:
        """End all connections after so many bytes, then after so many more, however fast they come."""
        with self._lock:
            self._sizes = iter(sizes)
            self._left = next(self._sizes, None)

    @property
    def all_cut(self) -> bool:
        """Whether there was enough on the wire for all of these cuts."""
        return self._left is None

    def cut(self) -> None:
        """End all connections, whatever is on its way."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """For good."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in list(self._threads):
            thread.join(10)
        for sock in self._open:
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(near)
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            self.connections += 1
            self._open.append(far)
            self._start(self._pump, near, far, True)
            self._start(self._pump, far, near, False)

    def _pump(self, source: socket.socket, sink: socket.socket, there: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                before_cut = self._before_cut(data)
                sink.sendall(before_cut)
                if len(before_cut) < len(data):
                    self.cut()
                self.there_bytes += len(data) * there
                self.back_bytes += len(data) * (not there)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _before_cut(self, data: bytes) -> bytes:
        """What of it goes through before the next cut: all of it if there is none."""
        with self._lock:
            if self._left is None or len(data) <= self._left:
                self._left = None if self._left is None else self._left - len(data)
                return data
            data, self._left = data[: self._left], next(self._sizes, None)
            return data

    def _start(self, target: Any, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()


def listening(
    lab: Lab, script: str | Path, *args: object, here: int, **dials: Any
) -> tuple[Running, tuple[str, int]]:
    """Begin a run that lets other hosts in, with so many workers here; and where it can be reached."""
    config = lab.config(script, *args, listen="127.0.0.1:0", here=here, **dials)
    lab._running = running = Running(lab.engine, config, SECRET)
    where = config.path / "address"
    wait_until(lambda: where.exists() and where.read_text().endswith("\n"), "the run listens")
    host, _, port = where.read_text().strip().rpartition(":")
    return running, (host, int(port))


class Apart:
    """A run whose first workers are here, and whose others come through a wire."""

    def __init__(
        self, lab: Lab, engine: LocalEngine, script: str | Path, *args: object, here: int, **dials: Any
    ) -> None:
        self.lab, self.engine = lab, engine
        self.trust = Trust() if dials.get("tls") else None
        self.running, self.address = listening(lab, script, *args, here=here, **dials)
        self.wire = Wire(self.address)

    def host(self, workers: int) -> None:
        """Start the second host."""
        via = f"{self.wire.address[0]}:{self.wire.address[1]}"
        config, guest = enrol(via, SECRET, workers, self.lab.root / "there", 30, self.trust)
        self.config, self.ranks = config, guest.ranks
        self.engine.launch(config, SECRET, guest)
        self.pids = dict(zip(guest.ranks, self.engine.pids, strict=True))
        self.logs = config.path / "logs"

    @property
    def relay_pid(self) -> int:
        """The process between the second host's workers and the store."""
        return max(set(children(self.engine._process.pid)) - set(self.pids.values()))

    def kill(self, rank: int) -> None:
        """SIGKILL a worker of the second host."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], signal.SIGKILL)

    def kill_host(self) -> None:
        """SIGKILL everything on the second host."""
        for pid in (self.relay_pid, *self.pids.values()):
            os.kill(pid, signal.SIGKILL)

    def finish(self) -> Run:
        """Wait for both hosts."""
        run = self.lab.finish(self.running)
        ended = self.engine.wait(LONGEST_S)
        assert isinstance(ended, Ended), "the second host hangs"
        self.statuses = ended.statuses
        self.wire.close()
        return run
