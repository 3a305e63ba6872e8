"""torchrun, and whatever else says `RANK`, `WORLD_SIZE` and `MASTER_ADDR`: Slurm, Kubernetes, a shell.

`torchrun --nproc-per-node 4 script.py` just works: `join` finds the environment. So do the flags of
`paceline train`: `torchrun --nproc-per-node 4 -m paceline train script.py --protocol dssp`. Rank 0
starts the store beside itself and tells the others through torchrun's own key-value store where
it is. The run's secret goes the same way, unless PACELINE_SECRET is set on every host: whoever can
read torchrun's store can read it there. When torchrun starts all workers anew after a failure, the
new ones go on from the checkpoint that the old run left; as long as it may do so, a failed
worker ends the run, whose others are about to be killed anyway. If rank 0's standard error is a terminal, a
process beside it says now and then how the run goes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.engines.meeting import Meeting, open_store, plain_environment, take_seat
from paceline.errors import ConfigError, RunError
from paceline.fabric.wire import new_secret
from paceline.runtime import seat as seats
from paceline.store.folders import saved_in

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 300.0
LAST_WORD_S = 5.0
SAVING_S = 30.0
"""How long the store of a run that failed may take to save it."""


def launched() -> bool:
    """Whether this process is one of several workers that torchrun, or the like, started."""
    return all(name in os.environ for name in NEEDED) and _number("WORLD_SIZE") > 1


def rank() -> int:
    """This worker's rank."""
    return _number("RANK")


def sit_down() -> None:
    """Take a seat for a script that runs by itself, and see to it that its end is heard."""
    from paceline.runtime.script import end_script

    if seats.mine() is not None or not launched():
        return
    seat = take_part({"script": sys.argv[0], "args": tuple(sys.argv[1:])}, Path("runs"))
    seats.take(seat)
    shown = sys.excepthook
    failure: list[BaseException] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure.append(error)
        shown(kind, error, trace)

    sys.excepthook = note
    atexit.register(lambda: end_script(seat, failure[0] if failure else None))


def take_part(asked: dict[str, Any], runs: Path) -> seats.Seat:
    """This worker's place in the run that rank 0 opens."""
    config = msgspec.convert(
        asked | {"run": "", "folder": "", "workers": _number("WORLD_SIZE")}, RunConfig, strict=False
    )
    board = _board()
    key = f"paceline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/meeting"
    if rank() == 0:
        try:
            config = _with_folder(config, runs)
            meeting = open_store(config, os.environ.get("PACELINE_SECRET") or new_secret())
        except Exception as error:
            board.set(key, b"error " + str(error).encode())
            raise
        board.set(key, msgspec.json.encode(_without_known_secret(meeting)))
        print(f"run {config.folder}", file=sys.stderr)
        if sys.stderr.isatty():
            _tell_progress(config.folder)
    try:
        told = board.get(key)
    except Exception as error:  # torch raises plain RuntimeError, DistStoreError and others
        raise RunError(f"rank 0 did not say where the store is: {error}") from None
    if told.startswith(b"error "):
        raise ConfigError(told.removeprefix(b"error ").decode())
    return take_seat(_with_known_secret(msgspec.json.decode(told, type=Meeting)), rank(), config)


def _tell_progress(folder: str) -> None:
    """A process that says how the run goes, until this one has ended in whatever way."""
    command = (sys.executable, "-m", "paceline.view.beside", folder)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env=plain_environment()
    )
    atexit.register(_last_word, process)


def _last_word(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORD_S)


def _without_known_secret(meeting: Meeting) -> Meeting:
    """What goes on the board: a secret that all have been given stays off it."""
    known = os.environ.get("PACELINE_SECRET")
    return msgspec.structs.replace(meeting, secret="") if known else meeting


def _with_known_secret(meeting: Meeting) -> Meeting:
    secret = meeting.secret or os.environ.get("PACELINE_SECRET", "")
    if not secret:
        raise ConfigError("rank 0 was given PACELINE_SECRET and this worker was not. Set it on all hosts.")
    return msgspec.structs.replace(meeting, secret=secret)


def _board() -> Any:
    """The key-value store of whoever launched us."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    mine = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            address, port, is_master=mine, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False
        )
    except Exception as error:
        raise RunError(f"cannot reach torchrun's store at {address}:{port}: {error}") from None


def _with_folder(config: RunConfig, runs: Path) -> RunConfig:
    """A folder for the run; after a restart, the checkpoint that the run before left."""
    count = _number("TORCHELASTIC_RESTART_COUNT", 0)
    name = f"torchrun-{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}-{os.environ['MASTER_PORT']}"
    previous = [runs / f"{name}-{number}" for number in range(count - 1, -1, -1)]
    saved = (_saved(path) for path in previous)
    resume = next((str(checkpoint) for checkpoint in saved if checkpoint is not None), config.resume)
    folder = runs / f"{name}-{count}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write runs to {runs}: {error.strerror}.") from None
    if _number("TORCHELASTIC_MAX_RESTARTS", 0) > count:  # all are about to be started anew
        config = msgspec.structs.replace(config, on_failure="stop")
    listen = config.listen or f"{_own_address()}:0"
    return msgspec.structs.replace(
        config, run=folder.name, folder=str(folder), resume=resume, listen=listen, here=0
    )


def _saved(folder: Path) -> Path | None:
    """The checkpoint that a run left; one that is just ending is waited for."""
    until = time.monotonic() + SAVING_S
    while folder.is_dir() and not (folder / "result.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    return saved_in(folder)


def _own_address() -> str:
    """Where other hosts reach this one; loopback when there are none."""
    if _number("LOCAL_WORLD_SIZE", 0) == _number("WORLD_SIZE"):
        return "127.0.0.1"
    try:
        return socket.gethostbyname(os.environ["MASTER_ADDR"])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r} in the environment is not a number.")
    return int(text)
