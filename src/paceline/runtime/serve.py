"""The owner's process: from its first worker to the last line of the trace."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.runtime.loops import RealLoop
from paceline.runtime.owner import Owner
from paceline.runtime.replay import ReplayLoop
from paceline.runtime.virtual import VirtualLoop
from paceline.sim.request import ClusterRequest
from paceline.trace import read_trace


def serve(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> int:
    """Hold the store for these workers (channel and pid, by rank) until all are gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loop: RealLoop | VirtualLoop | ReplayLoop
    if config.replay is not None:
        loop = ReplayLoop(read_trace(Path(config.replay)), config.until, stop)
        owner = Owner(config, loop.clock)
        loop.attach(owner, workers)
    elif config.cluster is None:
        owner = Owner(config, time.monotonic)
        loop = RealLoop(owner, workers, stop)
    else:
        cluster = msgspec.convert(config.cluster, ClusterRequest, strict=False).cluster()
        loop = VirtualLoop(cluster, config.seed, stop)
        owner = Owner(config, loop.clock, exchange_s=loop.exchange_s)
        loop.attach(owner, workers)
    try:
        loop.run()
    except BaseException as error:  # a bug of ours, or a torch error: the workers must not wait for ever
        owner.halt("failed", f"the store failed, {type(error).__name__}: {error}")
        raise
    finally:
        owner.close()
    return 0
