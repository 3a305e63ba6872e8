"""The hosts of the benchmark of a small cluster, and how either side is started on them, and stopped.

Host a has the first worker, and the store of the protocols that have one. Ranks are given out in the
order in which hosts come, so each is waited for before the next is called. Where hosts stall, one at a time,
their processes are stopped, and go on later.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from paceline.errors import RunError
from paceline.testbed import BedHost, Testbed
from paceline_bench.cluster import script as cluster_script
from paceline_bench.cluster.other import trace_of
from paceline_bench.cluster.scene import Scene

FIRST_PORT = 29600
SEATED_S = 120.0
"""How long a host may take until it has its rank."""
LAST_WORDS_S = 5.0
"""When a host has ended, how long the first one has to say why."""
INTERFACES = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
STOPPED_S = 20.0
"""How long a run may take to save itself when it is stopped."""


class HostProcesses:
    """The processes of one run; what they say is in files beside its traces."""

    def __init__(self, scene: Scene, bed: Testbed, words: list[str], folder: Path, port: int) -> None:
        """`words` are the body's, which gets the folder for its copies along with them."""
        self._scene, self._bed, self._folder = scene, bed, folder
        self._address = f"{next(iter(bed.values())).address}:{port}"
        self.copies = folder / "copies"
        self.copies.mkdir(parents=True)
        self._words = [*words, "--copies", str(self.copies)]
        self._processes: dict[str, subprocess.Popen[Any]] = {}

    def start(self) -> None:
        """Start all."""
        raise NotImplementedError

    @property
    def traces(self) -> list[Path]:
        """Files in which the run tells of itself, as far as they are there."""
        raise NotImplementedError

    @property
    def statuses(self) -> dict[str, int | None]:
        """How the process of each host has ended; None: not yet. What serves them does not count."""
        hosts = set(self._bed)
        return {name: process.poll() for name, process in self._processes.items() if name in hosts}

    def failure(self) -> str | None:
        """What was said by a process that has ended, the first host's rather than another's; or None."""
        ended = [name for name, process in self._processes.items() if process.poll() is not None]
        if not ended:
            return None
        first = next(iter(self._processes))
        _wait([self._processes[first]], LAST_WORDS_S)
        name = first if self._processes[first].poll() is not None else ended[0]
        return self.last_words(name) or f"host {name} ended with {self._processes[name].returncode}"

    def stop(self) -> None:
        """End whatever is left of it."""
        for host in self._bed.values():
            host.kill()

    def last_words(self, name: str) -> str:
        """Of a process, about what went wrong rather than anything else."""
        lines = [line for line in self._said(name).read_text().splitlines() if line.strip()]
        mistakes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return (mistakes or lines or [""])[-1]

    def _popen(
        self, host: str, command: list[str], environment: dict[str, str], name: str | None = None
    ) -> None:
        name = host if name is None else name
        with self._said(name).open("w") as said:
            process = self._bed[host].popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | environment,
                cwd=self._folder,
            )
        self._processes[name] = process

    def _said(self, name: str) -> Path:
        return self._folder / f"{name}.txt"

    @property
    def _slow(self) -> list[str]:
        return [word for rank, factor in self._scene.slow.items() for word in ("--slow", f"{rank}:{factor}")]


class Flagged(Protocol):
    """What is trained, as flags of `paceline train`."""

    @property
    def flags(self) -> list[str]:
        """In order."""


class Script(NamedTuple):
    """A script for `paceline train`."""

    file: str
    flags: list[str]
    """Of the command,"""
    words: list[str]
    """and of the script."""


class OurProcesses(HostProcesses):
    """`paceline train` on the first host, `paceline host` on the others."""

    def __init__(
        self, scene: Scene, bed: Testbed, entry: Flagged, words: list[str], folder: Path, port: int
    ) -> None:
        super().__init__(scene, bed, words, folder, port)
        self._entry, self._secret = entry, secrets.token_hex(32)

    def start(self) -> None:
        """One after the other, so that ranks are those of hosts."""
        first, script = next(iter(self._bed)), self._script()
        team = ["--workers", str(self._scene.workers), "--here", "1", "--listen", self._address]
        team.append("--plain")  # as the others are, with which this is compared
        flags = [*self._entry.flags, *team, *script.flags, "--runs", str(self._folder / "runs")]
        self._paceline(first, ["train", script.file, *flags, "--", *script.words])
        for rank, host in list(enumerate(self._bed))[1:]:
            self._paceline(
                host, ["host", self._address, "--plain", "--runs", str(self._folder / f"runs-{host}")]
            )
            if not self._seated(host, rank):
                return

    def _script(self) -> Script:
        """What all workers run."""
        emulated = ["--device-time", str(self._scene.device_s), *self._slow]
        return Script(cluster_script.__file__, [*emulated, "--seed", _seed_of(self._words)], self._words)

    @property
    def traces(self) -> list[Path]:
        """The store's."""
        return [self._folder / "runs" / "latest" / "trace.jsonl"]

    def stop(self) -> None:
        """It is asked to, so that nothing is cut off; then whatever is left is killed."""
        running = [process for process in self._processes.values() if process.poll() is None]
        if running:
            running[0].send_signal(signal.SIGINT)
            _wait(running, STOPPED_S)
        super().stop()

    def _paceline(self, host: str, words: list[str]) -> None:
        self._popen(host, [sys.executable, "-m", "paceline", *words], {"PACELINE_SECRET": self._secret})

    def _seated(self, host: str, rank: int) -> bool:
        """Wait until a host has its rank; False when something has ended first."""
        deadline = time.monotonic() + SEATED_S
        while self.failure() is None:
            seat = re.search(r"ranks? (\d+) of", self._said(host).read_text())
            if seat is not None:
                assert int(seat[1]) == rank, "hosts are called one by one"
                return True
            if time.monotonic() > deadline:
                raise RunError(f"host {host} had no rank within {SEATED_S:g} s: {self.last_words(host)}")
            time.sleep(0.02)
        return False


class OtherProcesses(HostProcesses):
    """A module of somebody else's, one process per host."""

    module = "paceline_bench.rivals.workers.ddp"

    def start(self) -> None:
        """As torchrun would."""
        for rank, host in enumerate(self._bed):
            self._popen(host, self._command(), self._place(rank))

    @property
    def traces(self) -> list[Path]:
        """One per rank."""
        return [trace_of(self._folder, rank) for rank in range(self._scene.workers)]

    def _command(self) -> list[str]:
        return [sys.executable, "-m", self.module, *self._mine, *self._words]

    @property
    def _mine(self) -> list[str]:
        return ["--folder", str(self._folder), "--device-time", str(self._scene.device_s), *self._slow]

    def _place(self, rank: int) -> dict[str, str]:
        master, _, port = self._address.rpartition(":")
        workers = str(self._scene.workers)
        place = {"RANK": str(rank), "WORLD_SIZE": workers, "PEERS": workers, "LOCAL_RANK": "0"}
        return place | {"MASTER_ADDR": master, "MASTER_PORT": port} | INTERFACES


class Stalls:
    """Stops and wakes the hosts of a scene, as its plan says; all are awake when it is left."""

    def __init__(self, scene: Scene, bed: Testbed) -> None:
        self._plan, self._hosts = scene.stall, list(bed.values())
        self._still: int | None = None
        self._began: float | None = None

    def look(self, seconds: float) -> None:
        """The first iteration began so many seconds ago, at the last sign of life; 0: it has not yet."""
        if self._plan is None or seconds <= 0:
            return
        if self._began is None:
            self._began = time.monotonic() - seconds
        self._let_stand(self._plan.who(time.monotonic() - self._began, len(self._hosts)))

    def _let_stand(self, rank: int | None) -> None:
        if rank == self._still:
            return
        if self._still is not None:
            _send(self._hosts[self._still], signal.SIGCONT)
        if rank is not None:
            _send(self._hosts[rank], signal.SIGSTOP)
        self._still = rank

    def __enter__(self) -> Stalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_stand(None)


def bytes_over(host: BedHost) -> int:
    """What a host's link has carried so far, both ways, as its kernel counts."""
    for line in host.run(["cat", "/proc/net/dev"], timeout_s=10).stdout.splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            fields = counts.split()
            return int(fields[0]) + int(fields[8])
    raise RunError(f"host {host.name!r} has no link eth0.")


def _seed_of(words: list[str]) -> str:
    return words[words.index("--seed") + 1]


def _wait(processes: list[subprocess.Popen[Any]], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def _send(host: BedHost, number: signal.Signals) -> None:
    for pid in host.pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)
