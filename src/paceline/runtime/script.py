"""Runs a user's script as a worker, and sees to it that its end is heard, whatever it is."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import runpy
import socket
import sys
import traceback
from pathlib import Path
from textwrap import shorten

import numpy as np
import torch

from paceline.errors import ConfigError, PacelineError, RunError, RunStopped
from paceline.runtime import seat as seats
from paceline.runtime.join import joined
from paceline.runtime.messages.workers import Failed, Hello
from paceline.runtime.seat import Seat
from paceline.runtime.worker.data.helpers import spare_helpers
from paceline.runtime.worker.environment import hint_for, tell_environment
from paceline.runtime.worker.stacks import be_ready
from paceline.trace import TraceWriter, events
from paceline.trace.life import claim

LONGEST = 500
"""Characters of an error that are passed on; the log has all of it."""


def run_script(seat: Seat, threads: int, conducted: bool = True) -> int:
    """Run the script in this process; the exit status. `conducted`: somebody tells how the run ended, so
    that this worker need not."""
    config = seat.config
    assert config.script is not None
    if seat.rank in config.park:  # the owner goes on without it
        return 0
    faulthandler.enable()
    be_ready(config.path, f"rank{seat.rank}")
    torch.set_num_threads(threads)
    _seed(config.seed)  # all ranks alike, so that they split and make the same data; prepare seeds them apart
    if conducted:  # else torchrun has told, and ends its processes itself
        tell_environment(seat)
        spare_helpers()
    seats.take(seat)
    if seat.channel is None:
        claim(config.path, os.getpid())
    sys.argv = [config.script, *config.args]
    find_modules_of(config.script)
    error: BaseException | None = None
    exits = False
    try:
        _check_there(config.script)
        runpy.run_path(config.script, run_name="__main__")
    except SystemExit as stop:
        exits = True
        if stop.code not in (None, 0):
            error = RunError(f"the script exited with {stop.code}")
    except BaseException as caught:  # whatever it is, the others must hear of it
        error = caught
        if not isinstance(caught, PacelineError):
            _show(caught)
        elif not isinstance(caught, RunStopped | ConfigError) or _has_left():
            print(caught, file=sys.stderr)
    if error is None and joined() is None:
        error = _not_joined(config.script, exits)
    status = end_script(seat, error)
    if not conducted and isinstance(error, RunStopped | ConfigError):
        print(f"error: rank {seat.rank}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return status


def find_modules_of(script: str) -> None:
    """A script finds the modules beside it, and those of the folder that the run was started in."""
    sys.path[:0] = [str(Path(script).resolve().parent), os.getcwd()]


def _show(error: BaseException) -> None:
    pace = joined()
    if pace is None or not pace.withholds(error):
        traceback.print_exception(error)


def _has_left() -> bool:
    """Whether the run hears nothing of this worker any more, so that only its log can tell."""
    pace = joined()
    return pace is not None and pace.left


def _check_there(script: str) -> None:
    if not os.path.isfile(script):
        raise ConfigError(f"no script at {script} on host {socket.gethostname()}.")


def _not_joined(script: str, exits: bool) -> ConfigError:
    if exits:
        return ConfigError(
            f"{script} exited by itself before it called paceline.join(...), so nothing was trained. To see "
            f"what it says with these arguments, run it alone: python {script} ..."
        )
    return ConfigError(
        f"{script} never called paceline.join(...), so its workers cannot find each other. "
        "Add `pace = paceline.join()` and `pace.prepare(model, optimizer, loader)`."
    )


def end_script(seat: Seat, error: BaseException | None) -> int:
    """Tell the run how the script ended; the exit status."""
    pace = joined()
    text = "" if error is None else _one_line(error)
    if pace is not None:
        pace.end(error, text)
    elif seat.channel is not None and error is not None:
        with contextlib.suppress(OSError):
            seat.channel.send(Hello(os.getpid(), None, {}, seat.rank))  # it never got so far
            seat.channel.send(Failed("config" if isinstance(error, ConfigError) else "error", text))
    elif error is not None:
        _leave_a_trace(seat, error, text)
    return 0 if error is None or isinstance(error, RunStopped) else 1


def _leave_a_trace(seat: Seat, error: BaseException, text: str) -> None:
    """A lone script that failed before it joined."""
    from paceline.store.ledger import run_not_begun

    writer = TraceWriter(seat.config.path / "trace.jsonl")
    writer.write(run_not_begun(seat.config, simulated=False))
    writer.write(events.RunEnded(0.0, "failed", text, isinstance(error, ConfigError)))
    writer.close()


def _one_line(error: BaseException) -> str:
    message = shorten(str(error), LONGEST, placeholder=" ... (see the log)")
    message += hint_for(str(error))
    return message if isinstance(error, PacelineError) else f"{type(error).__name__}: {message}".rstrip(": ")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
