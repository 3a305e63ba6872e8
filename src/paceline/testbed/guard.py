"""The guard: a process that outlives the owner of a testbed just long enough to take it down.

No signal handler does this: an owner may be killed at once, or have handlers of its own.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from paceline.testbed import records

_WATCH = "import sys; from paceline.testbed.guard import watch; watch(sys.argv[1])"


def start_guard(name: str) -> subprocess.Popen[bytes]:
    """Watch over a testbed that this process owns."""
    own = Path(__file__).parents[2]
    paths = [str(own), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _WATCH, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the owner
    )


def watch(name: str) -> None:
    """Wait until the owner is gone, then remove what it left."""
    from paceline.testbed.bed import take_down_stale

    record = records.read(name)
    if record is None or record.owner is None:
        return
    try:
        descriptor = os.pidfd_open(record.owner.pid)
    except ProcessLookupError:
        take_down_stale()
        return
    if record.owner.alive:
        select.select([descriptor], [], [])
    take_down_stale()
