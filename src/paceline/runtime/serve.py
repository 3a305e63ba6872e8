"""The owner's process: from its first worker to the last line of the trace."""

from __future__ import annotations

import signal
import time

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.runtime.loops import RealLoop
from paceline.runtime.owner import Owner


def serve(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> int:
    """Hold the store for these workers (channel and pid, by rank) until all are gone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    owner = Owner(config, time.monotonic)
    loop = RealLoop(owner, stop)
    for rank, (channel, pid) in enumerate(workers):
        loop.add(rank, channel, pid)
    try:
        loop.run()
    finally:
        owner.close()
    return 0
