"""A warm Ray actor as parameter server: gradients and weights travel through Ray's object store.

The cluster is the benchmark's own: never one that happens to run here, and with a token made for it
alone, so that strangers stay out and Ray neither uses nor leaves one in the home folder.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import select
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import RunError
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.servers import Client, PushServer, count_workers
from paceline_bench.harness.stations import ExchangeLoad

NAMESPACE = "paceline-bench"
START_TIMEOUT_S = 90.0


def installed() -> bool:
    """Whether there is a Ray to compare with."""
    return importlib.util.find_spec("ray") is not None


class ServerActor:
    """The server, in Ray's terms: arrays in, arrays out."""

    def __init__(self, load: ExchangeLoad, variant: str) -> None:
        self._server = PushServer(load, variant)

    def push(self, rank: int, gradient: Any) -> Any:
        """Apply and answer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays in the object store cannot be written to; nobody does
            tensor = torch.from_numpy(gradient)
        return self._server.push(rank, tensor).numpy()

    def count(self) -> int:
        """Workers that pushed."""
        return len(self._server.seen)


class RayStation(Client):
    """Pushes by an actor's method."""

    def __init__(self, load: ExchangeLoad, rank: int, folder: str, token: str) -> None:
        _authenticate(token)
        import ray

        super().__init__(load, rank)
        quiet: Any = {"log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=_wait_for_address(Path(folder)), namespace=NAMESPACE, **quiet)
        self._ray = ray
        self._actor: Any = ray.get_actor("server")
        self.prepare()
        self.exchange()
        self.world = count_workers(self._count, load.workers)

    def _count(self) -> int:
        seen: Any = self._ray.get(self._actor.count.remote(), timeout=60)
        return int(seen)

    def exchange(self) -> None:
        """Push and pull."""
        self.received = self._ray.get(self._actor.push.remote(self.rank, self.gradient.numpy()), timeout=60)

    def close(self) -> None:
        """Disconnect."""
        self._ray.shutdown()


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
    _authenticate(token)
    import ray

    context: Any = ray.init(
        "local",
        _node_ip_address="127.0.0.1",
        num_cpus=1,  # the actor; its callers are no part of the cluster
        include_dashboard=False,
        namespace=NAMESPACE,
        object_store_memory=max(200_000_000, 8 * load.workers * load.size_bytes),
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=folder,
    )
    remote: Any = ray.remote(ServerActor)
    actor = remote.options(name="server", num_cpus=1).remote(load, variant)
    ray.get(actor.count.remote(), timeout=START_TIMEOUT_S)
    partial_name = Path(folder) / "address.partial"
    partial_name.write_text(context.address_info["address"])
    partial_name.rename(Path(folder) / "address")
    _wait_until_gone(pids)
    ray.shutdown()


def _authenticate(token: str) -> None:
    """Before Ray is imported: how its processes know each other."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}


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
