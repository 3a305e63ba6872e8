"""A worker as a process of its own, for engines whose processes are not ours to take over: Ray's, Spark's.

Its order comes on standard input, where nobody can read the run's secret in the list of processes; what
the script prints goes to whoever started it. It dies with that process, whatever happens to it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.engines.meeting import MeetingPoint, plain_environment, take_seat
from paceline.errors import PacelineError, RunStopped
from paceline.fabric.stop_signals import die_with, wait_for_word

CHUNK = 1 << 16


class WorkerOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker of which run to be, and how many cores are its own."""

    config: RunConfig
    meeting: MeetingPoint
    rank: int
    threads: int = 1
    local: tuple[int, int] | None = None
    """Its place among the workers of its host, and how many they are; None: all are on one."""
    beside: bool = False
    """Whether the store is on the same host."""
    folder: str = ""
    """Where to run the script, if there is such a folder."""
    source: str = ""
    """The script's text, for hosts on which it is not to be found."""
    partition: int | None = None
    """A file, inherited by number: the rows that are this worker's data."""


def start_worker(order: WorkerOrder) -> subprocess.Popen[bytes]:
    """The process; all it prints comes from its standard output."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.engines.worker", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=() if order.partition is None else (order.partition,),
        env=plain_environment() | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin is not None
    with child.stdin as pipe:
        pipe.write(msgspec.json.encode(order))
    return child


def run_worker(order: WorkerOrder, hear: Callable[[bytes], None]) -> int:
    """Start it, and pass on what it prints until it ends; its exit status."""
    child = start_worker(order)
    assert child.stdout is not None
    try:
        while data := os.read(child.stdout.fileno(), CHUNK):
            hear(data)
        return child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def main() -> None:
    """Be one worker, from the first to the last line of the script."""
    die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wait_for_word()
    order = decode_json(sys.stdin.buffer.read(), kind=WorkerOrder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if os.path.isdir(order.folder):
        os.chdir(order.folder)
    with tempfile.TemporaryDirectory(prefix="paceline-") as spare:
        status = _work(order, _with_script(order, Path(spare)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _with_script(order: WorkerOrder, spare: Path) -> RunConfig:
    """The run's settings with a script that is there."""
    config = order.config
    if not order.source or config.script is None or os.path.isfile(config.script):
        return config
    script = spare / Path(config.script).name
    script.write_text(order.source)
    return msgspec.structs.replace(config, script=str(script))


def _work(order: WorkerOrder, config: RunConfig) -> int:
    from paceline.runtime.script import run_script

    try:
        seat = take_seat(order.meeting, order.rank, config, order.beside)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 0 if isinstance(error, RunStopped) else 1
    seat.partition, seat.local = order.partition, order.local
    return run_script(seat, order.threads)


if __name__ == "__main__":
    main()
