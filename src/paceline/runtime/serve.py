"""The owner's process: from its first worker to the last line of the trace."""

from __future__ import annotations

import signal
import time
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.runtime.loops import RealLoop
from paceline.runtime.owner import Owner
from paceline.runtime.virtual import VirtualLoop
from paceline.sim.request import ClusterRequest


def serve(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> int:
    """Hold the store for these workers (channel and pid, by rank) until all are gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.cluster is not None:
        return _serve_virtually(config, config.cluster, workers, stop)
    owner = Owner(config, time.monotonic)
    loop = RealLoop(owner, stop)
    for rank, (channel, pid) in enumerate(workers):
        loop.add(rank, channel, pid)
    try:
        loop.run()
    finally:
        owner.close()
    return 0


def _serve_virtually(
    config: RunConfig, request: dict[str, Any], workers: list[tuple[Channel, int]], stop: int
) -> int:
    cluster = msgspec.convert(request, ClusterRequest, strict=False).cluster()
    loop = VirtualLoop(cluster, config.seed, stop)
    owner = Owner(config, lambda: loop.now, exchange_s=loop.exchange_s)
    loop.attach(owner, workers)
    try:
        loop.run()
    finally:
        owner.close()
    return 0
