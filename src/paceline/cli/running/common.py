"""What all commands share: how values are given, how answers and errors are printed."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any

import typer

from paceline.errors import ConfigError, PacelineError
from paceline.fabric.stop_signals import heeded

DEBUG = "PACELINE_DEBUG"
SAME_REQUEST_S = 0.5
"""Signals other than Ctrl-C that come within this time of the first are one request."""


@contextlib.contextmanager
def errors_for_people() -> Iterator[None]:
    """One `error:` line instead of a traceback; 2 for the user's mistakes, 1 for failed runs; 128 and its
    number for a signal that ended the command at once."""
    try:
        yield
    except Interrupted as error:
        raise typer.Exit(128 + error.number) from None
    except PacelineError as error:
        if os.environ.get(DEBUG):
            raise
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except BrokenPipeError:
        raise  # whoever read the output has seen enough: no error, and typer's to end
    except OSError as error:
        if os.environ.get(DEBUG):
            raise
        print(f"error: {_about_files(error)}", file=sys.stderr)
        raise typer.Exit(1) from None


def _about_files(error: OSError) -> str:
    file = f" {error.filename}" if error.filename else ""
    return (
        f"cannot read or write{file}: {error.strerror or error}. "
        "Check that it exists, that you may write there and that the disk has room, or choose another folder "
        "with --runs. --debug shows where it happened."
    )


def parse_settings(given: list[str]) -> dict[str, Any]:
    """`--set name=value`, any number of times."""
    settings = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ConfigError(f"--set takes name=value, got {item!r}. For instance --set staleness=3.")
        settings[name.strip()] = value.strip()
    return settings


def parse_slow(given: list[str]) -> dict[int, float]:
    """`--slow rank:factor`, comma separated or repeated."""
    slow: dict[int, float] = {}
    for item in (part for text in given for part in text.split(",") if part):
        rank, _, factor = item.partition(":")
        try:
            slow[int(rank)] = float(factor)
        except ValueError:
            raise ConfigError(f"--slow takes rank:factor, got {item!r}. For instance --slow 3:2.5.") from None
    return slow


def parse_weighting(text: str) -> str | float:
    """mean, sum, or a number."""
    if text in ("mean", "sum"):
        return text
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--weighting takes mean, sum or a number, got {text!r}.") from None


def new_run(runs: Path, name: str) -> tuple[str, Path]:
    """A fresh folder for a run, named after the time and what it is."""
    from paceline.store.disk.folders import new_folder

    run = f"{datetime.now():%Y%m%d-%H%M%S}-{name}-{token_hex(2)}"
    return run, new_folder(runs, run)


def check_script(script: Path) -> None:
    """A script that is there."""
    if not script.is_file():
        raise ConfigError(f"no script at {script}. Give the path of a Python file.")


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


class Interrupted(KeyboardInterrupt):
    """One of the signals that ask for an end has come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)

    def __str__(self) -> str:
        return "Ctrl-C" if self.number == signal.SIGINT else self.number.name


def heed_termination() -> None:
    """Take SIGTERM, SIGHUP and SIGQUIT for Ctrl-C: so a machine that is about to be taken away, or a terminal
    that closes, says that it is time to save. Further ones that belong to the first are not a second request:
    `timeout` sends SIGTERM twice, and a terminal SIGHUP."""
    if threading.current_thread() is not threading.main_thread():
        return
    asked_at: list[float] = []

    def interrupt(number: int, frame: object) -> None:
        mute_if_hung_up()
        same = asked_at and number != signal.SIGINT and time.monotonic() - asked_at[0] < SAME_REQUEST_S
        if not same and not (asked_at and number == signal.SIGHUP):
            asked_at.append(time.monotonic())
            raise Interrupted(number)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    for number in heeded():
        signal.signal(number, interrupt)


def mute_if_hung_up() -> None:
    """Nobody reads what is written to a terminal that was closed, and to write to it is an error."""
    for fd in (1, 2):
        try:
            termios.tcgetattr(fd)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, fd)
                os.close(nowhere)
