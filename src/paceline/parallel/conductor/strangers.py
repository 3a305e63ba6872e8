"""The conductor of a mesh whose workers somebody else started, on this host: torchrun's."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable

import msgspec

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.fabric.neighbours import take_neighbour
from paceline.fabric.presence import Allowance
from paceline.fabric.wire import show_address
from paceline.parallel.conductor.conducting import Conductor
from paceline.parallel.messages import conductor_decoder
from paceline.runtime.messages.workers import Hello
from paceline.trace import read_trace, tally

GATHER_S = 300.0
"""How long workers may take to come."""
LOOK_S = 0.2


def conduct_strangers(
    config: RunConfig, ready: Callable[[str], socket.socket], stop: int | None = None
) -> int:
    """Wait for all workers, then conduct. `ready` is told an address, and gives what they come through."""
    with socket.create_server(
        ("127.0.0.1", 0)
    ) as sign_of_life:  # who asks whether the run is over looks there
        listener = ready(show_address(*sign_of_life.getsockname()[:2]))
        came = _gather(config, listener, stop)
        known = [came.get(rank) for rank in range(config.workers)]
        workers = [(each[0], each[1].pid) for each in known if each is not None]
        ranks = [rank for rank, each in enumerate(known) if each is not None]
        conductor = Conductor(config, workers, stop, ranks)
        for _, (_, hello) in sorted(came.items()):
            conductor.greet(hello)
        if len(workers) < config.workers:
            missing = next(rank for rank in range(config.workers) if rank not in came)
            conductor.give_up(missing, "it never came")
        status = conductor.run()
    result = tally(read_trace(config.path)).result()
    (config.path / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    return status


def _gather(config: RunConfig, listener: socket.socket, stop: int | None) -> dict[int, tuple[Channel, Hello]]:
    """Who comes, by rank; not all, if somebody came and is gone again, or after a long time."""
    came: dict[int, tuple[Channel, Hello]] = {}
    patience = Allowance(GATHER_S)
    while len(came) < config.workers and not patience.over:
        if any(_is_gone(hello.pid) for _, hello in came.values()):
            return came
        looked = [listener.fileno(), *([] if stop is None else [stop])]
        ready, _, _ = select.select(looked, [], [], LOOK_S)
        if stop in ready:
            return came
        taken = take_neighbour(listener) if ready else None
        if taken is None:
            continue
        channel = Channel(taken[0])
        received = channel.receive(conductor_decoder)
        if received is not None and isinstance(received[0], Hello) and received[0].rank is not None:
            came[received[0].rank] = channel, received[0]
    return came


def _is_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")
