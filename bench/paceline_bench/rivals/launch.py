"""How a rival's processes are started on a testbed, each with the interpreter that has the rival."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from pathlib import Path

import paceline
import paceline_bench
from paceline.errors import RunError
from paceline.testbed import Testbed
from paceline_bench.cluster.hosts import OtherProcesses
from paceline_bench.cluster.other import trace_of
from paceline_bench.cluster.scene import Scene
from paceline_bench.rivals.roster import WORKERS, Found, Rival
from paceline_bench.wrapped.ray_actor import secret

SERVER = "server"
ATTEMPTS = 4
"""How many times torchrun starts its workers at most."""
READY_S = 300.0
"""How long what has to run before the workers may take."""


class RivalProcesses(OtherProcesses):
    """Nodes first where a rival has any, then its server, then one worker per host."""

    def __init__(
        self,
        scene: Scene,
        bed: Testbed,
        rival: Rival,
        found: Found,
        words: list[str],
        folder: Path,
        port: int,
    ) -> None:
        super().__init__(scene, bed, words, folder, port)
        self._rival, self._found = rival, found
        self.module = f"{WORKERS}.{rival.module}"
        self._token = secrets.token_hex(32)
        self._short = Path(tempfile.mkdtemp(prefix="pl-"))  # sockets' paths below it may have 107 characters
        self._packages = folder / "packages"
        self._packages.mkdir()
        for package in (paceline, paceline_bench):
            folder_of = Path(str(package.__file__)).parent
            (self._packages / folder_of.name).symlink_to(folder_of)

    def start(self) -> None:
        """All of them."""
        first, *others = self._bed
        if self._rival.node:
            self._start_aside(first, 0, "node", f"{first}-node")
            for rank, host in enumerate(others, 1):
                self._start_aside(host, rank, "node", f"{host}-node", wait=False)
        if self._rival.server:
            self._start_aside(first, self._scene.workers, SERVER, SERVER, wait=self._rival.node)
        for rank, host in enumerate(self._bed):
            self._popen(host, self._command_of(rank), self._place(rank))

    def stop(self) -> None:
        """Nothing is left of it."""
        super().stop()
        shutil.rmtree(self._short, ignore_errors=True)

    @property
    def traces(self) -> list[Path]:
        """One per rank and attempt, as far as they are there."""
        attempts = ATTEMPTS if self._elastic else 1
        ranks = range(self._scene.workers)
        return [trace_of(self._folder, rank, attempt) for attempt in range(attempts) for rank in ranks]

    @property
    def _elastic(self) -> bool:
        """Where nobody is killed, torchrun would only take time to start."""
        return self._rival.restarts and bool(self._scene.epochs)

    def _command_of(self, rank: int) -> list[str]:
        if not self._elastic:
            return self._command()
        run = ["-m", "torch.distributed.run", "--nnodes", str(self._scene.workers), "--nproc-per-node", "1"]
        run += ["--max-restarts", str(ATTEMPTS - 1), "--rdzv-backend", "c10d", "--rdzv-id", "peers"]
        address = list(self._bed.values())[rank].address
        run += ["--rdzv-endpoint", self._address, "--local-addr", address, "--monitor-interval", "0.1"]
        snapshots = ["--snapshots", str(self._folder / "snapshot.safetensors")]
        return [self._found.python, *run, "-m", self.module, *self._mine, *snapshots, *self._words]

    def _command(self) -> list[str]:
        return [self._found.python, "-m", self.module, *self._mine, *self._words]

    def _place(self, rank: int) -> dict[str, str]:
        place = super()._place(rank)
        if self._elastic:  # torchrun says who is who, and where they meet
            place = {name: value for name, value in place.items() if not _torchrun(name)}
            # agents count restarts differently, and in one common store workers would look for each other
            # under different names: after a restart they would find the dead
            place["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        host = list(self._bed.values())[min(rank, self._scene.workers - 1)]
        address = next(iter(self._bed.values())).address if rank == self._scene.workers else host.address
        return place | {
            "PYTHONPATH": str(self._packages),
            "RIVAL": self._rival.name,
            "RIVAL_ADDRESS": address,
            "RIVAL_FOLDER": str(self._folder),
            "RIVAL_SHORT": str(self._short),
            **secret(self._token),
            "OMP_NUM_THREADS": "1",
        }

    def _start_aside(self, host: str, rank: int, role: str, name: str, wait: bool = True) -> None:
        """A process beside the workers; if it is waited for, it says that it is ready by a file."""
        self._popen(host, self._command(), self._place(rank) | {"RIVAL_ROLE": role}, name)
        ready, deadline = self._folder / f"{role}.ready", time.monotonic() + READY_S
        while wait and not ready.exists():
            # a server would wait for a node that is gone
            gone = [each for each, process in self._processes.items() if process.poll() is not None]
            if gone or time.monotonic() > deadline:
                failed = next(iter(gone), name)
                raise RunError(f"{failed} of {self._rival.name} did not start: {self.last_words(failed)}")
            time.sleep(0.05)


def _torchrun(name: str) -> bool:
    return name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
