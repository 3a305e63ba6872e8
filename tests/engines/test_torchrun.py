"""Workers that torchrun started: with nothing but their script, with our flags, and after a restart."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.config import RunConfig
from paceline.engines import torchrun as engine
from paceline.engines.meeting import Meeting
from paceline.trace import read_trace
from paceline.trace.events import Decided, Event, RunEnded, WorkerJoined
from support.runs import SCRIPTS, Lab, once, wait_until
from support.tensors import assert_equal

SIZES = ("--samples", "80", "--batch", "4", "--epochs", "2")
pytestmark = pytest.mark.timeout(150)


LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run it in a folder; whatever it started is gone afterwards."""
    dials: dict[str, Any] = {"cwd": folder, "env": environment(folder), "timeout": 140}
    done = subprocess.run([*LAUNCH, *command], **dials, capture_output=True, text=True)
    wait_until(lambda: not strays(folder), "the store's process has ended", 20)
    return done


def torchrun_at_a_terminal(folder: Path, *command: str) -> tuple[int, str]:
    """The same, with a terminal for standard error; the status, and what stands there."""
    master, slave = os.openpty()
    process = subprocess.Popen([*LAUNCH, *command], cwd=folder, env=environment(folder), stderr=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # so a terminal ends, when nobody has it any more
        while data := os.read(master, 4096):
            shown += data
    os.close(master)
    status = process.wait(60)
    wait_until(lambda: not strays(folder), "the store's process has ended", 20)
    return status, shown.decode()


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"PACELINE_TEST_FOLDER": str(folder), "TERM": "xterm"}


def strays(folder: Path) -> list[Path]:
    """Processes that were started for this folder."""

    def of_it(process: Path) -> bool:
        try:
            return f"PACELINE_TEST_FOLDER={folder}".encode() in (process / "environ").read_bytes()
        except OSError:
            return False

    return [process for process in Path("/proc").glob("[0-9]*") if of_it(process)]


def events(folder: Path, kind: type[Event]) -> list[Event]:
    return [event for event in read_trace(folder) if isinstance(event, kind)]


def test_a_script_under_torchrun_is_a_run_and_equals_the_local_engine(lab: Lab, tmp_path: Path) -> None:
    near = lab.trained("train.py", "momentum", *SIZES, workers=2, protocol="bsp")
    status, shown = torchrun_at_a_terminal(tmp_path, str(SCRIPTS / "train.py"), "momentum", *SIZES)
    assert status == 0, shown
    assert shown.count("rank 0 is done: ") == 1, shown
    assert " % of 160 · " in shown
    (folder,) = (tmp_path / "runs").glob("torchrun-*")
    assert len(events(folder, WorkerJoined)) == 2
    assert_equal(load_file(folder / "weights.safetensors"), near.weights)


def test_after_a_restart_workers_go_on_from_what_the_failed_run_left(tmp_path: Path) -> None:
    script = ("-m", "paceline", "train", str(SCRIPTS / "breaks_once.py"))
    done = torchrun(tmp_path, "--max-restarts", "1", *script)
    assert done.returncode == 0, done.stderr
    assert "samples/s" not in done.stderr, "progress is for terminals"
    first, second = sorted((tmp_path / "runs").glob("torchrun-*"))
    assert "broken on purpose" in done.stderr
    ended = events(first, RunEnded)[0]
    assert isinstance(ended, RunEnded)
    assert ended.status == "failed"
    config = msgspec.json.decode((second / "config.json").read_bytes(), type=RunConfig)
    assert config.resume is not None
    assert Path(config.resume).parent.name == first.name
    assert used(first, second) == once(3, 240)


def used(*folders: Path) -> dict[tuple[int, int], int]:
    """Which positions went into pushes, over all runs."""
    places: dict[tuple[int, int], int] = {}
    for folder in folders:
        for event in events(folder, Decided):
            assert isinstance(event, Decided)
            for epoch, start, size in event.work if event.pushed is not None else ():
                for position in range(start, start + size):
                    places[epoch, position] = places.get((epoch, position), 0) + 1
    return places


class Board(dict[str, bytes]):
    """torchrun's key-value store, as far as it is used."""

    def set(self, key: str, value: str | bytes) -> None:
        self[key] = value.encode() if isinstance(value, str) else value

    def add(self, key: str, number: int) -> int:
        self[key] = str(int(self.get(key, b"0")) + number).encode()
        return int(self[key])


@pytest.mark.parametrize(("given", "written"), [("a secret that all hosts know", False), ("", True)])
def test_a_secret_that_all_were_given_is_not_written_where_others_may_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, written: bool
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (place | {"PACELINE_SECRET": given}).items():
        monkeypatch.setenv(name, value)
    board = Board()
    monkeypatch.setattr(engine, "_board", lambda: board)
    monkeypatch.setattr(engine, "open_store", lambda config, secret: Meeting("127.0.0.1:2", secret))
    monkeypatch.setattr(engine, "take_seat", lambda meeting, rank, config: meeting)
    used = cast(Meeting, engine.take_part({}, tmp_path))
    assert len(used.secret) >= 16
    assert used.secret == given or not given
    assert (used.secret.encode() in b"".join(board.values())) is written
