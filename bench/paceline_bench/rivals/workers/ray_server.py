"""A parameter server in a Ray actor: one Ray node per host, the actor on the first, a driver per worker.

The cluster is the benchmark's own, with a token made for it alone: strangers stay out, and Ray neither uses
nor leaves one in the home folder.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline_bench.cluster.other import config_of, parser, run
from paceline_bench.cluster.script import options
from paceline_bench.rivals.workers.serving import ParameterServer, ServedPace

NAME = "ray"
NAMESPACE = "paceline-bench"
PORT = 29520
MEET_S = 120.0
STORE_BYTES = 200_000_000
STARTS = 4
"""How many times a node is started at most, until it is up."""
STARTED = "Ray runtime started"
AGENT_PORTS = {
    "dashboard-agent-grpc-port": 29521,
    "dashboard-agent-listen-port": 29522,
    "metrics-export-port": 29523,
    "runtime-env-agent-port": 29524,
}
"""Of a node's helpers. Left to choose, they tell the node which they took, and a node that has not heard
within half a minute dies: on two busy cores importing them takes longer. A host has its ports for itself."""


class Actor:
    """The server, in Ray's terms: arrays in, arrays out."""

    def __init__(self, words: list[str], workers: int) -> None:
        self._server = ParameterServer(options(words), workers)

    def push(self, rank: int, gradient: Any) -> tuple[Any, int]:
        """Apply and answer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # arrays in the object store cannot be written to; nobody does
            tensor = torch.from_numpy(gradient)
        weights, pushes = self._server.push(rank, tensor)
        return weights.numpy(), pushes

    def greet(self, rank: int) -> int:
        """A worker is there; how many are."""
        return self._server.greet(rank)


class RayPace(ServedPace):
    """Pushes by an actor's method."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        rank = int(os.environ["RANK"])
        self._ray = _connected()
        self._actor: Any = self._ray.get_actor("server")
        super().__init__(NAME, config, snapshots, rank, self._present(rank, config.workers))

    def exchange(self, gradient: Tensor) -> tuple[Tensor, int]:
        """Push and pull."""
        answer: Any = self._ray.get(self._actor.push.remote(self.rank, gradient.numpy()), timeout=60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.from_numpy(answer[0]), int(answer[1])

    def close(self) -> None:
        """Disconnect."""
        super().close()
        self._ray.shutdown()

    def _present(self, rank: int, workers: int) -> int:
        deadline, seen = time.monotonic() + MEET_S, 0
        while seen < workers and time.monotonic() < deadline:
            found: Any = self._ray.get(self._actor.greet.remote(rank), timeout=60)
            seen = int(found)
            time.sleep(0.05)
        return seen


def _connected() -> Any:
    import ray

    quiet: Any = {"log_to_driver": False, "logging_level": logging.ERROR}
    where = f"{os.environ['MASTER_ADDR']}:{PORT}"
    ray.init(address=where, namespace=NAMESPACE, _node_ip_address=os.environ["RIVAL_ADDRESS"], **quiet)
    return ray


def hold_node() -> None:
    """A node of this host; it lives as long as this process."""
    mine, head = os.environ["RIVAL_ADDRESS"], os.environ["MASTER_ADDR"]
    words = [f"--node-ip-address={mine}", "--num-cpus=1", f"--object-store-memory={STORE_BYTES}"]
    words += ["--disable-usage-stats", "--block", *(f"--{name}={port}" for name, port in AGENT_PORTS.items())]
    if mine == head:
        first = ["--head", f"--port={PORT}", "--include-dashboard=false", '--resources={"first": 1}']
        words += [*first, f"--temp-dir={os.environ['RIVAL_SHORT']}"]
    else:
        words.append(f"--address={head}:{PORT}")
    command = [str(Path(sys.executable).parent / "ray"), "start", *words]
    # Ray gives a node 30 s to start, whatever is set: a busy machine needs more than one try
    for _ in range(STARTS):
        held = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if _came_up(held, first=mine == head):
            break
    raise SystemExit(held.wait())


def _came_up(held: subprocess.Popen[str], first: bool) -> bool:
    """Pass on what a node says, to its end; the others wait until the first is up."""
    assert held.stdout is not None
    came_up = False
    for line in held.stdout:
        print(line, end="", flush=True)
        if STARTED in line:
            came_up = True
            if first:
                (Path(os.environ["RIVAL_FOLDER"]) / "node.ready").touch()
    return came_up


def serve() -> None:
    """Make the actor and hold it, until this process is ended."""
    ray = _connected()
    mine, words = parser().parse_known_args()
    workers = config_of(mine, options(words).seed, NAME).workers
    deadline = time.monotonic() + MEET_S
    while len(ray.nodes()) < workers and time.monotonic() < deadline:
        time.sleep(0.1)
    remote: Any = ray.remote(Actor)
    chosen = {"name": "server", "num_cpus": 1, "resources": {"first": 1}, "max_concurrency": 1}
    actor = remote.options(**chosen).remote(words, workers)
    ray.get(actor.greet.remote(0), timeout=MEET_S)
    (Path(os.environ["RIVAL_FOLDER"]) / "server.ready").touch()
    signal.sigwait({signal.SIGTERM})


ROLES = {"node": hold_node, "server": serve}

if __name__ == "__main__":
    # the module as others see it: a class that travels is found by its name
    from paceline_bench.rivals.workers import ray_server as named

    role = os.environ.get("RIVAL_ROLE")
    named.ROLES[role]() if role else run(named.RayPace, NAME)
