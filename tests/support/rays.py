"""A Ray for tests: one per module, with a token of its own, gone afterwards with all that belonged to it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.config import RunConfig
from paceline.engines.control import Ended
from paceline.testbed import BedHost
from paceline.trace import Result
from support.runs import TOKEN, Run, wait_until

OURS = "PACELINE_TESTS_RAY"
"""In the environment of all processes of a Ray for tests, for theirs are not those of a run."""


MISSING = "needs Ray: pip install 'paceline[ray]'"


def ray_environment() -> dict[str, str]:
    """How processes of one Ray know each other, and we know them."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        OURS: secrets.token_hex(8),
    }


@contextmanager
def short_folder() -> Iterator[str]:
    """Paths of Ray's sockets may not be longer than 107 characters."""
    folder = tempfile.mkdtemp(prefix="pl-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


HOLD = """
import logging, ray, sys
quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
folder, cpus = sys.argv[1:]
context = ray.init("local", num_cpus=int(cpus), object_store_memory=100_000_000, _temp_dir=folder, **quiet)
print(context.address_info["address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""
"""In a process of its own: Ray's open files and processes are no business of the tests' warnings."""


@dataclass(frozen=True)
class OneNode:
    """A Ray that is up."""

    address: str
    mark: str

    def workers_left(self) -> list[int]:
        """Processes that an actor started and that are still there."""
        return processes_of(self.mark, "paceline.engines.worker")


@contextmanager
def ray_for_a_module(cpus: int) -> Iterator[OneNode]:
    """A Ray of one node. Whoever is started in the meantime knows its token, but does not carry its mark."""
    pytest.importorskip("ray", reason=MISSING)
    environment = ray_environment()
    with short_folder() as folder, pytest.MonkeyPatch.context() as patch:
        for name in set(environment) - {OURS}:
            patch.setenv(name, environment[name])
        own = os.environ | environment
        outside = {name: value for name, value in own.items() if name != TOKEN}  # it outlives the runs
        command = [sys.executable, "-c", HOLD, folder, str(cpus)]
        with subprocess.Popen(command, stdin=-1, stdout=-1, env=outside, text=True) as holder:
            assert holder.stdin is not None
            assert holder.stdout is not None
            yield OneNode(holder.stdout.readline().strip(), environment[OURS])
            holder.stdin.close()
            holder.wait(30)
        wait_until(lambda: not processes_of(environment[OURS]), "Ray is gone", 30)


def run_in(folder: Path) -> Run:
    """A run of the command that is over."""
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=RunConfig)
    return Run(msgspec.structs.replace(config, folder=str(folder)), Ended({}, 0))


def processes_of(mark: str, command: str = "") -> list[int]:
    """Processes that carry this mark in their environment, and this in their command line; not our own."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if (
                    mark.encode() in (process / "environ").read_bytes()
                    and command.encode() in (process / "cmdline").read_bytes()
                ):
                    found.append(int(process.name))
            except OSError:
                continue
    return found


class TwoNodes:
    """A Ray of two nodes on two hosts, with room for two workers on each; it goes with the hosts."""

    def __init__(self, head: BedHost, other: BedHost, folder: str) -> None:
        pytest.importorskip("ray", reason=MISSING)
        self.address = f"{head.address}:6379"
        self.environment = os.environ | ray_environment()
        self._head = head
        first = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}")
        self._start(head, *first)
        self._start(other, f"--address={self.address}")

    def _start(self, host: BedHost, *flags: str) -> None:
        here = ("--num-cpus=2", "--object-store-memory=100000000", f"--node-ip-address={host.address}")
        self._run(host, "ray.scripts.scripts", "start", *here, *flags)

    def train(self, script: Path, *args: object, cwd: Path) -> Result:
        """Run `paceline train` on the first node."""
        words = self._words(script, "--json", *args)
        return msgspec.json.decode(self._run(self._head, *words, cwd=cwd), type=Result)

    def start(self, script: Path, *args: object, cwd: Path) -> subprocess.Popen[str]:
        """Begin a run there."""
        command = [sys.executable, "-m", *self._words(script, *args)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self._head.popen(command, cwd=cwd, env=self.environment, **streams)

    def _words(self, script: Path, *args: object) -> list[str]:
        words = ("paceline", "train", script, "--engine", "ray", "--address", self.address, *args)
        return [str(word) for word in words]

    def _run(self, host: BedHost, *words: str, **options: Any) -> str:
        command = [sys.executable, "-m", *words]
        done = host.run(command, timeout_s=200, env=self.environment, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
