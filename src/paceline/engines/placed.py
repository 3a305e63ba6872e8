"""A worker process that somebody else's task starts and watches: an engine's own process stays its own.

The order comes on standard input, as JSON; what the script prints goes to the task, line by line as
it comes. The worker dies with the task that started it, whatever happens to that.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.engines.meeting import Meeting, take_seat
from paceline.engines.zygote import die_with
from paceline.errors import PacelineError

CHUNK = 1 << 16


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker needs to know in order to begin."""

    config: RunConfig
    meeting: Meeting
    rank: int
    threads: int = 1
    source: str = ""
    """The script's text, for hosts on which it is not to be found."""
    folder: str = ""
    """Where the script would like to run."""
    partition: int | None = None
    """A file, inherited by number: the rows that are this worker's data."""


def run_worker(place: Place, hear: Callable[[bytes], None]) -> int:
    """Run the script as a process of its own, from its first word to its last; its exit status."""
    inherited = () if place.partition is None else (place.partition,)
    child = subprocess.Popen(
        [sys.executable, "-m", "paceline.engines.placed", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=inherited,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin as order:
            order.write(msgspec.json.encode(place))
        while data := os.read(child.stdout.fileno(), CHUNK):
            hear(data)
        return child.wait()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def main() -> None:
    """Be that process."""
    die_with(int(sys.argv[1]))
    place = msgspec.json.decode(sys.stdin.buffer.read(), type=Place)
    if os.path.isdir(place.folder):
        os.chdir(place.folder)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        try:
            status = _run(place, Path(folder))
        except PacelineError as error:
            print(error, file=sys.stderr)
            status = 1
    sys.exit(status)


def _run(place: Place, spare: Path) -> int:
    from paceline.runtime.script import run_script

    config = place.config
    assert config.script is not None
    if not os.path.isfile(config.script):
        script = spare / Path(config.script).name
        script.write_text(place.source)
        config = msgspec.structs.replace(config, script=str(script))
    seat = take_seat(place.meeting, place.rank, config)
    seat.partition = place.partition
    return run_script(seat, place.threads)


if __name__ == "__main__":
    main()
