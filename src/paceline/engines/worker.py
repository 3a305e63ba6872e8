"""A worker's process, started by an engine that cannot fork: its order comes on standard input.

There nobody can read the run's secret in the list of processes. The process dies with its parent.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from paceline.config import RunConfig
from paceline.engines.meeting import Meeting, take_seat
from paceline.engines.zygote import die_with
from paceline.errors import PacelineError, RunStopped


class WorkerOrder(msgspec.Struct, frozen=True):
    """Which worker of which run to be, and how many cores are its own."""

    meeting: Meeting
    rank: int
    config: RunConfig
    threads: int
    beside: bool
    """Whether the store is on the same host."""


def main() -> None:
    """Be one worker, from the first to the last line of the script."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerOrder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    status = _work(order)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _work(order: WorkerOrder) -> int:
    from paceline.runtime.script import run_script

    try:
        seat = take_seat(order.meeting, order.rank, order.config, order.beside)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 0 if isinstance(error, RunStopped) else 1
    return run_script(seat, order.threads)


if __name__ == "__main__":
    main()
