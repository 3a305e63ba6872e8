"""A warm Ray actor as parameter server, for the benchmark of the store."""

from __future__ import annotations

import importlib.util
import os
import secrets
import select
import shutil
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from paceline.errors import RunError
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.servers import MEET_TIMEOUT_S, Client, PushServer
from paceline_bench.harness.stations import ExchangeLoad
from paceline_bench.wrapped.ray_actor import RayClient, connected, hold, secret

START_TIMEOUT_S = 90.0


def installed() -> bool:
    """Whether there is a Ray to compare with."""
    return importlib.util.find_spec("ray") is not None


class RayStation(Client):
    """Pushes by an actor's method."""

    def __init__(self, load: ExchangeLoad, rank: int, folder: str, token: str) -> None:
        os.environ |= secret(token)
        super().__init__(load, rank)
        self._client = RayClient(rank, _wait_for_address(Path(folder)))
        self.prepare()
        self.exchange()
        self.world = self._client.present(load.workers, MEET_TIMEOUT_S)

    def exchange(self) -> None:
        """Push and pull."""
        self.received = self._client.push(self.gradient)

    def close(self) -> None:
        """Disconnect."""
        self._client.leave()


def ray_crew(load: ExchangeLoad, variant: str) -> BenchCrew:
    """A Ray cluster on this machine, the actor, and its workers."""
    folder = tempfile.mkdtemp(prefix="pl-")  # short: sockets' paths below it may have 107 characters
    token = secrets.token_hex(32)
    crew = BenchCrew("ray", [partial(RayStation, load, rank, folder, token) for rank in range(load.workers)])
    crew.at_end(partial(shutil.rmtree, folder, ignore_errors=True))
    crew.help_with(hold_ray, load, variant, folder, token, crew.pids)
    return crew


def hold_ray(load: ExchangeLoad, variant: str, folder: str, token: str, pids: Sequence[int]) -> None:
    """The process that keeps Ray running as long as there are workers."""
    os.environ |= secret(token)
    ray = connected(
        "local",
        _node_ip_address="127.0.0.1",
        num_cpus=1,  # the actor; its callers are no part of the cluster
        include_dashboard=False,
        object_store_memory=max(200_000_000, 8 * load.workers * load.size_bytes),
        _temp_dir=folder,
    )
    held = hold(ray, START_TIMEOUT_S, PushServer, load, variant)
    partial_name = Path(folder) / "address.partial"
    partial_name.write_text(ray.get_runtime_context().gcs_address)
    partial_name.rename(Path(folder) / "address")
    _wait_until_gone(pids)
    del held
    ray.shutdown()


def _wait_for_address(folder: Path) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (folder / "address").exists():
            return (folder / "address").read_text()
        time.sleep(0.05)
    raise RunError(f"Ray did not start within {START_TIMEOUT_S:g} s.")


def _wait_until_gone(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        select.select([watched], [], [])
        os.close(watched)
