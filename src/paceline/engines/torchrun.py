"""torchrun, and whatever else says `RANK`, `WORLD_SIZE` and `MASTER_ADDR`: Slurm, Kubernetes, a shell.

`torchrun --nproc-per-node 4 script.py` just works: `join` finds the environment. So do the flags of
`paceline train`: `torchrun --nproc-per-node 4 -m paceline train script.py --protocol dssp`. Rank 0
starts the store beside itself and tells the others through torchrun's own key-value store where
it is, and what was asked of it. The run's secret goes the same way, unless PACELINE_SECRET is set on every
host: whoever can read torchrun's store can read it there. When torchrun starts all workers anew after a
failure, the new ones go on from the checkpoint that the old run left; as long as it may do so, a failed
worker ends the run, whose others are about to be killed anyway. A process beside rank 0 prints what the run
came to when it is over; if standard error is a terminal, it says how the run goes as well.

How often they were started is not the same number on all hosts (a host whose workers were well does not
count). So what is told is a letter to each rank, which takes it away: one that is still there was written
for a worker that died before it read it, and its store is gone by now.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.engines.meeting import MeetingPoint, open_store, over_hosts, plain_environment, take_seat
from paceline.errors import ConfigError, RunError
from paceline.fabric.choice import secured
from paceline.fabric.wire import new_secret, parse_address
from paceline.runtime import seat as seats
from paceline.store.disk.checksums import newest_sound
from paceline.store.disk.folders import new_folder

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE_S = 300.0
LAST_WORD_S = 5.0
SAVING_S = 30.0
"""How long the store of a run that failed may take to save it."""
AGAIN_S = 60.0
"""How long rank 0 may take to write again after a restart, when a letter from before was still there."""
REACH_S = 5.0


class Letter(msgspec.Struct, frozen=True):
    """What rank 0 tells another: where the run is, and what it is."""

    meeting: MeetingPoint
    config: RunConfig


_boards: list[Any] = []
"""Kept as long as this process: if rank 0 has made it, those who come late still look there."""


_tellers: list[subprocess.Popen[bytes]] = []
"""On rank 0: the process that tells how the run goes, and what it came to."""


def launched() -> bool:
    """Whether this process is one of several workers that torchrun, or the like, started."""
    return all(name in os.environ for name in NEEDED) and _number("WORLD_SIZE") > 1


def rank() -> int:
    """This worker's rank."""
    return _number("RANK")


def sit_down(axis: str | None = None) -> None:
    """Take a seat for a script that runs by itself, and see to it that its end is heard. `axis`: along which
    its model is split, with as many places as there are workers."""
    if seats.mine() is not None or not launched():
        return
    asked: dict[str, Any] = {"script": sys.argv[0], "args": tuple(sys.argv[1:])}
    if axis is not None:
        asked["mesh"] = {axis: _number("WORLD_SIZE")}
    seat = take_part(asked, Path("runs"))
    seats.take(seat)
    shown = sys.excepthook
    failure: list[BaseException] = []

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failure.append(error)
        shown(kind, error, trace)

    sys.excepthook = note
    atexit.register(lambda: _conclude(seat, failure[0] if failure else None))


def _conclude(seat: seats.Seat, error: BaseException | None) -> None:
    from paceline.runtime.script import end_script

    end_script(seat, error)
    await_summary(error is None)


def take_part(asked: dict[str, Any], runs: Path) -> seats.Seat:
    """This worker's place in the run that rank 0 opens."""
    board = _board()
    letter = _open_run(board, asked, runs) if rank() == 0 else _read(board)
    config = msgspec.structs.replace(letter.config, script=asked.get("script"))  # as it is called here
    return take_seat(letter.meeting, rank(), config, beside=rank() == 0)


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """What keeps rank 0 from opening a run is told to the others, who wait for its word."""
    try:
        yield
    except Exception as error:
        if launched() and rank() == 0:
            _tell(_board(), b"error " + str(error).encode())
        raise


def _open_run(board: Any, asked: dict[str, Any], runs: Path) -> Letter:
    """Start the store, and tell everybody."""
    with telling():
        config = _with_folder(board, _asked_for(asked), runs)
        meeting = open_store(_listening(config), os.environ.get("PACELINE_SECRET") or new_secret())
    _tell(board, msgspec.json.encode(Letter(_without_known_secret(meeting), config)))
    print(f"run {config.folder}", file=sys.stderr)
    _tell_progress(config.folder, sys.stderr.isatty())
    return Letter(meeting, config)


def _asked_for(asked: dict[str, Any]) -> RunConfig:
    given = asked | {"run": "", "folder": "", "workers": _number("WORLD_SIZE")}
    try:
        return msgspec.convert(given, RunConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{str(error).rstrip('.')}.") from None


def _tell(board: Any, text: bytes) -> None:
    for other in range(1, _number("WORLD_SIZE")):
        board.set(_address(other), text)


def _read(board: Any) -> Letter:
    """What rank 0 of the same start has to say; letters of an earlier one are thrown away."""
    gone = ""
    while True:
        try:
            told = board.get(_address(rank()))
        except Exception as error:  # torch raises plain RuntimeError, DistStoreError and others
            raise RunError(gone or f"rank 0 did not say where the store is: {error}") from None
        board.delete_key(_address(rank()))
        if told.startswith(b"error "):
            raise ConfigError(told.removeprefix(b"error ").decode())
        letter = decode_json(told, kind=Letter)
        if not _is_gone(letter.meeting):
            return msgspec.structs.replace(letter, meeting=_with_known_secret(letter.meeting))
        gone = f"the run at {letter.meeting.address} is over already; read what rank 0 says."
        board.set_timeout(timedelta(seconds=AGAIN_S))


def _address(other: int) -> str:
    return f"paceline/letter/{other}"


def _is_gone(meeting: MeetingPoint) -> bool:
    """Whether nobody listens there any more; a link that is cut may come back."""
    try:
        socket.create_connection(parse_address(meeting.address), REACH_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _tell_progress(folder: str, terminal: bool) -> None:
    """A process that tells what the run came to, and at a terminal also how it goes, until this one has ended
    in whatever way."""
    words = (folder,) if terminal else (folder, "quiet")
    command = (sys.executable, "-P", "-m", "paceline.view.terminal.beside", *words)
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True, env=plain_environment()
    )
    _tellers.append(process)


def await_summary(well: bool) -> None:
    """This worker's part is over. Rank 0 waits until the run has ended and its summary is printed; not if its
    own script failed, which whoever started it is to hear at once."""
    for process in _tellers:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(None if well else LAST_WORD_S if sys.stderr.isatty() else 0.0)
    _tellers.clear()


def _without_known_secret(meeting: MeetingPoint) -> MeetingPoint:
    """What goes on the board: a secret that all have been given stays off it."""
    known = os.environ.get("PACELINE_SECRET")
    return msgspec.structs.replace(meeting, secret="") if known else meeting


def _with_known_secret(meeting: MeetingPoint) -> MeetingPoint:
    secret = meeting.secret or os.environ.get("PACELINE_SECRET", "")
    if not secret:
        raise ConfigError("rank 0 was given PACELINE_SECRET and this worker was not. Set it on all hosts.")
    return msgspec.structs.replace(meeting, secret=secret)


def _board() -> Any:
    """The key-value store of whoever launched us."""
    if _boards:
        return _boards[0]
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    mine = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=PATIENCE_S)
    try:
        board = TCPStore(address, port, is_master=mine, timeout=patience, wait_for_workers=False)
    except Exception as error:
        raise RunError(f"cannot reach torchrun's store at {address}:{port}: {error}") from None
    _boards.append(board)
    return board


def _with_folder(board: Any, config: RunConfig, runs: Path) -> RunConfig:
    """A folder for the run, which says what was asked; after a restart, with the checkpoint of the last."""
    attempt = board.add("paceline/attempts", 1)
    run = f"torchrun-{time.strftime('%Y%m%d-%H%M%S')}-{attempt}-{secrets.token_hex(2)}"
    board.set(f"paceline/folder/{attempt}", str(runs / run))  # first: who comes next looks for it
    folder = new_folder(runs, run)
    before = (Path(board.get(f"paceline/folder/{past}").decode()) for past in range(attempt - 1, 0, -1))
    saved = (_saved(path) for path in before)
    resume = next((str(checkpoint) for checkpoint in saved if checkpoint is not None), config.resume)
    config = msgspec.structs.replace(config, run=run, folder=str(folder), resume=resume)
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    return config


def _listening(config: RunConfig) -> RunConfig:
    """As its store needs it. If all are going to be started anew after a failure, they need not go on."""
    if config.mesh is not None:
        return _on_one_host(config)
    restarts = _number("TORCHELASTIC_MAX_RESTARTS", 0) > _number("TORCHELASTIC_RESTART_COUNT", 0)
    listening = msgspec.structs.replace(
        config,
        listen=config.listen or f"{_own_address()}:0",
        here=0,
        on_failure="stop" if restarts else config.on_failure,
    )
    return secured(listening)


def _on_one_host(config: RunConfig) -> RunConfig:
    """A mesh's groups are gloo's, which does not ask who connects: they stay on the loopback interface."""
    assert config.mesh is not None
    here, all_of_them = _number("LOCAL_WORLD_SIZE", 0), _number("WORLD_SIZE")
    if here != all_of_them:
        raise over_hosts(config.mesh, f"torchrun started {here} of {all_of_them} workers here")
    return config


def _saved(folder: Path) -> Path | None:
    """The checkpoint that a run left; one that is just ending is waited for."""
    until = time.monotonic() + SAVING_S
    while folder.is_dir() and not (folder / "result.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    checkpoint, damages = newest_sound(folder)
    for text in damages:
        print(f"warning: {text}", file=sys.stderr)
    return checkpoint


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
