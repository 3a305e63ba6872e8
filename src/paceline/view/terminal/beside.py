"""How a run goes, in lines, for a terminal that others write to as well: torchrun and all its workers.

A view that is drawn in place would wipe out what they say. `python -m paceline.view.terminal.beside FOLDER`
tells until its standard input ends, and so with whoever started it.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from paceline.errors import TraceError
from paceline.trace import TraceTail
from paceline.trace.events import RunEnded, WorkerLeft
from paceline.view.terminal.progress import RunProgress, live

LOOK_S = 0.5
PATIENCE_S = 3.0
"""So long the store may take to write down that rank 0 has left."""


def watch(
    folder: Path,
    over: Callable[[float], bool],
    console: Console | None = None,
    patience_s: float = PATIENCE_S,
) -> None:
    """Lines as they are due, and a last one; `over` waits so long at most, and tells whether it is."""
    progress, trace = RunProgress(console=console), TraceTail(folder / "trace.jsonl")
    try:
        with live(progress, plain=True):
            ended = False
            while not over(LOOK_S):
                ended |= _take(progress, trace)
            _take_the_rest(progress, trace, ended, time.monotonic() + patience_s)
    except (OSError, TraceError):  # the folder is gone: there is nothing more to tell
        return
    if progress.tally.start is not None:
        progress.print(f"rank 0 is done: {progress.line()}")


def _take_the_rest(progress: RunProgress, trace: TraceTail, ended: bool, until: float) -> None:
    """Up to where rank 0 has left: the store writes a moment after the worker has gone."""
    while not _take(progress, trace) and not ended and time.monotonic() < until:
        time.sleep(LOOK_S / 10)


def _take(progress: RunProgress, trace: TraceTail) -> bool:
    """Show what is new; whether rank 0 has left with it."""
    ended = False
    for event in trace.new_events():
        progress.add(event)
        ended |= isinstance(event, RunEnded) or (isinstance(event, WorkerLeft) and event.worker == 0)
    return ended


def _input_ends(within_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], within_s)[0])


if __name__ == "__main__":
    watch(Path(sys.argv[1]), _input_ends)
