"""How a worker that somebody else started finds its run: by a meeting point, and through its neighbours.

An engine hands every worker the meeting point, nothing more. On the store's own host the worker finds
the store by name and shares memory with it. On any other host it finds that host's relay, or starts
it: whoever is first does, and the relay ends with its last worker.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError, RunError, RunStopped
from paceline.fabric.channel import Channel
from paceline.fabric.neighbours import find_neighbour
from paceline.fabric.presence import Allowance
from paceline.fabric.tls import Trust
from paceline.protocols.grid import Grid
from paceline.runtime.seat import Seat

PATIENCE_S = 60.0
"""How long a process may take until it can be talked to."""


class MeetingPoint(msgspec.Struct, frozen=True):
    """Where a run can be joined, and what it takes."""

    address: str
    secret: str
    trust: Trust | None = None
    """None: the run does not use TLS."""
    portions: bool = False
    """Whether hosts are to hold portions of the store."""

    @property
    def name(self) -> str:
        """Under which neighbours find each other; who does not know the secret cannot guess it."""
        return hashlib.sha256(f"{self.address} {self.secret}".encode()).hexdigest()[:32]


class StoreOrder(msgspec.Struct, frozen=True):
    """What a store's process is told: the run, and its secret. It says where it listens."""

    config: RunConfig
    secret: str
    holder: int | None = None
    """The process to end with, in good order; None: it outlives whoever started it."""


def take_seat(meeting: MeetingPoint, rank: int, config: RunConfig, beside: bool = False) -> Seat:
    """This process's place in the run; its rank is what its engine says, which may know, too, that the store
    is on this host: then no relay is needed, and a store that is not there has ended."""
    patience = Allowance(PATIENCE_S)
    while True:
        sock = find_neighbour(meeting.name)
        if sock is not None:
            return Seat(rank, config, Channel(sock))
        if beside:
            raise RunStopped("the run is over already.")
        if config.mesh is not None:
            raise over_hosts(config.mesh, f"rank {rank} is on {socket.gethostname()}, the conductor is not")
        if patience.over:
            raise RunError(f"no relay came up on this host within {PATIENCE_S:g} s.")
        start_service("relay", msgspec.json.encode(meeting))


def over_hosts(mesh: Mapping[str, int], where: str) -> ConfigError:
    """Why a mesh stays on one host: the same words whoever places its workers."""
    return ConfigError(
        f"the mesh {Grid(mesh)} would reach over several hosts ({where}), where its groups (gloo) take in "
        f"whoever connects, and its conductor shares memory with all workers. Place all {Grid(mesh).count} "
        "workers on the host that the run is started on, or train over hosts without --mesh."
    )


def open_store(config: RunConfig, secret: str) -> MeetingPoint:
    """Start the process that holds the store; where it listens."""
    order = msgspec.json.encode(StoreOrder(config, secret))
    return meeting_of(config, start_service("store", order), secret)


def meeting_of(config: RunConfig, address: str, secret: str) -> MeetingPoint:
    """What a worker of this run has to know."""
    return MeetingPoint(address, secret, Trust() if config.tls else None, config.store_hosts > 1)


def start_service(kind: str, order: bytes) -> str:
    """A process of its own session that outlives us, once it has said that it is ready: its first line."""
    return launch_service(kind, order)[1]


def launch_service(kind: str, order: bytes) -> tuple[subprocess.Popen[bytes], str]:
    """The same, and the process itself."""
    command: Sequence[str] = (sys.executable, "-P", "-m", "paceline.engines.service", kind)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=plain_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        process.stdin.write(order)
        process.stdin.close()
        line = process.stdout.readline().decode().strip()
    word, _, rest = line.partition(" ")
    if word != "ready":
        mistaken = process.wait() == 2
        text = f"the {kind} of this run could not start: {rest or 'it ended without a message'}"
        raise ConfigError(text) if mistaken else RunError(text)
    return process, rest


def plain_environment() -> dict[str, str]:
    """Ours, without what a launcher told its workers, for processes that are none of them."""
    launchers = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_", "OMP_NUM_THREADS")
    return {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
