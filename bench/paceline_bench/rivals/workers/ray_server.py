"""A parameter server in a Ray actor: one Ray node per host, the actor on the first, a driver per worker.

The cluster is the benchmark's own, with a token made for it alone: strangers stay out, and Ray neither uses
nor leaves one in the home folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch import Tensor

from paceline.config import RunConfig
from paceline_bench.cluster.other import config_of, parser, run
from paceline_bench.cluster.script import options
from paceline_bench.rivals.workers.serving import ServedPace, server_of
from paceline_bench.wrapped.ray_actor import RayClient, as_tensor, connected, hold

NAME = "ray"
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


class RayPace(ServedPace):
    """Pushes by an actor's method."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        rank = int(os.environ["RANK"])
        self._client = RayClient(rank, **_place())
        super().__init__(NAME, config, snapshots, rank, self._client.present(config.workers, MEET_S))

    def exchange(self, gradient: Tensor) -> tuple[Tensor, int]:
        """Push and pull."""
        weights, pushes = self._client.push(gradient)
        return as_tensor(weights), int(pushes)

    def close(self) -> None:
        """Disconnect."""
        super().close()
        self._client.leave()


def _place() -> dict[str, str]:
    """The cluster, and this host's address in it."""
    return {
        "address": f"{os.environ['MASTER_ADDR']}:{PORT}",
        "_node_ip_address": os.environ["RIVAL_ADDRESS"],
    }


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
    ray = connected(**_place())
    mine, words = parser().parse_known_args()
    workers = config_of(mine, options(words).seed, NAME).workers
    deadline = time.monotonic() + MEET_S
    while len(ray.nodes()) < workers and time.monotonic() < deadline:
        time.sleep(0.1)
    held = hold(ray, MEET_S, server_of, words, workers, resources={"first": 1}, max_concurrency=1)
    (Path(os.environ["RIVAL_FOLDER"]) / "server.ready").touch()
    signal.sigwait({signal.SIGTERM})
    del held


ROLES = {"node": hold_node, "server": serve}

if __name__ == "__main__":
    role = os.environ.get("RIVAL_ROLE")
    ROLES[role]() if role else run(RayPace, NAME)
