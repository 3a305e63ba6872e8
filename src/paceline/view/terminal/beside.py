"""How a run goes, in lines, and what it came to, for a terminal that others write to as well: torchrun and
all its workers.

A view that is drawn in place would wipe out what they say. `python -m paceline.view.terminal.beside FOLDER`
tells until its standard input ends, and so with whoever started it.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from paceline.errors import TraceError
from paceline.trace import TraceTail
from paceline.trace.events import Note, RunEnded, WorkerLeft
from paceline.trace.life import owner_of
from paceline.view.terminal.progress import RunProgress, live
from paceline.view.terminal.table import summary

LOOK_S = 0.5
PATIENCE_S = 3.0
"""So long the store may take to write down that rank 0 has left."""


def watch(
    folder: Path,
    over: Callable[[float], bool],
    console: Console | None = None,
    patience_s: float = PATIENCE_S,
    quiet: bool = False,
) -> None:
    """Lines as they are due unless `quiet`, and what the run came to; `over` waits so long at most, and tells
    whether rank 0 is."""
    console = console or Console(stderr=True)
    progress, trace = RunProgress(console=console), TraceTail(folder / "trace.jsonl")
    try:
        with contextlib.nullcontext() if quiet else live(progress, plain=True):
            ended = False
            while not over(LOOK_S):
                ended |= _take(progress, trace, quiet)
            _take_the_rest(progress, trace, ended, time.monotonic() + patience_s, quiet)
        if progress.tally.start is not None and not quiet:
            progress.print(f"rank 0 is done: {progress.line()}")
        _await_the_end(folder, progress, trace, time.monotonic() + patience_s, quiet)
    except (OSError, TraceError):  # the folder is gone: there is nothing more to tell
        return
    if progress.tally.start is not None and progress.tally.end is not None:
        console.print(summary(progress.tally.result()))


def _await_the_end(folder: Path, progress: RunProgress, trace: TraceTail, until: float, quiet: bool) -> None:
    """Other workers may train on after rank 0; whoever holds the run writes its end, unless it is gone."""
    while progress.tally.end is None:
        holder = owner_of(folder)
        lives = time.monotonic() < until if holder is None else holder.alive
        _take(progress, trace, quiet)
        if not lives:
            return
        time.sleep(LOOK_S / 10)


def _take_the_rest(progress: RunProgress, trace: TraceTail, ended: bool, until: float, quiet: bool) -> None:
    """Up to where rank 0 has left: the store writes a moment after the worker has gone."""
    while not _take(progress, trace, quiet) and not ended and time.monotonic() < until:
        time.sleep(LOOK_S / 10)


def _take(progress: RunProgress, trace: TraceTail, quiet: bool) -> bool:
    """Show what is new, if `quiet` only what is a warning; whether rank 0 has left with it."""
    ended = False
    for event in trace.new_events():
        progress.add(event)
        if quiet and isinstance(event, Note) and event.level != "info":
            progress.print(f"{event.level}: {event.text}")
        ended |= isinstance(event, RunEnded) or (isinstance(event, WorkerLeft) and event.worker == 0)
    return ended


def _input_ends(within_s: float) -> bool:
    return bool(select.select([sys.stdin], [], [], within_s)[0])


if __name__ == "__main__":
    watch(Path(sys.argv[1]), _input_ends, quiet="quiet" in sys.argv[2:])
