"""Lets a process be asked where it is: on a signal it writes the Python stack of all its threads to a file.

`faulthandler` does so in the signal's own handler, in C: it works while the process sleeps, waits for a lock
or is deep in a library, needs no rights over the process but to signal it, and costs nothing until then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from pathlib import Path
from typing import IO

STACK_SIGNAL = signal.SIGRTMIN + 11
"""One that nothing else uses: scripts and schedulers have plans for SIGUSR1 and SIGUSR2."""
_files: list[IO[str]] = []


def stack_file(folder: Path, name: str) -> Path:
    """Where a process of a run writes its stacks."""
    return folder / "logs" / f"{name}.stack"


def be_ready(folder: Path, name: str) -> None:
    """Write the stacks to the run's folder when asked; where there is no such folder, on another host say,
    nobody can ask."""
    path = stack_file(folder, name)
    with contextlib.suppress(OSError):
        if folder.is_dir():
            path.parent.mkdir(exist_ok=True)
            _files.append(path.open("a"))
            faulthandler.register(STACK_SIGNAL, file=_files[-1], all_threads=True, chain=False)
