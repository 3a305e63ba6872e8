"""Workers that torchrun started: with nothing but their script, with our flags, and after a restart."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from safetensors.torch import load_file

from paceline.config import RunConfig
from paceline.engines import torchrun as engine
from paceline.engines.meeting import MeetingPoint
from paceline.errors import ConfigError
from paceline.store.disk.folders import saved_in
from paceline.trace import read_trace
from paceline.trace.events import Decided, Event, RunEnded, WorkerJoined
from support.ports import free_port
from support.runs import SCRIPTS, Lab, once, wait_until
from support.tensors import assert_equal

SIZES = ("--samples", "80", "--batch", "4", "--epochs", "2")
pytestmark = pytest.mark.timeout(240)


LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def torchrun_at_a_terminal(folder: Path, *command: str) -> tuple[int, str]:
    """Run it in a folder, with a terminal for standard error; the status, and what stands there. Whatever it
    started is gone afterwards."""
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
    summary = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "2 workers · finished after" in summary, "what paceline train prints at the end"
    assert "160 of 160 at" in summary
    (folder,) = (tmp_path / "runs").glob("torchrun-*")
    assert len(events(folder, WorkerJoined)) == 2
    assert_equal(load_file(folder / "weights.safetensors"), near.weights)


def two_nodes(folder: Path, *command: str) -> tuple[list[int], str]:
    """One worker under each of two agents, as on two hosts; their statuses, and what they said."""
    port = str(free_port())
    launch = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1")
    meet = ("--master-addr", "127.0.0.1", "--master-port", port)
    with (folder / "said").open("w+") as said:
        dials: dict[str, Any] = {"cwd": folder, "env": environment(folder), "stdout": said, "stderr": said}
        nodes = [
            subprocess.Popen([*launch, *meet, "--node-rank", str(rank), *command], **dials)
            for rank in range(2)
        ]
        statuses = [node.wait(200) for node in nodes]
    wait_until(lambda: not strays(folder), "all processes have ended", 20)
    return statuses, (folder / "said").read_text()


@pytest.mark.long
def test_after_a_restart_workers_of_all_nodes_go_on_from_what_the_failed_run_left(tmp_path: Path) -> None:
    script = ("-m", "paceline", "train", str(SCRIPTS / "breaks_once.py"))
    statuses, said = two_nodes(tmp_path, "--max-restarts", "1", *script)
    assert statuses == [0, 0], said
    assert "samples/s" not in said, "progress is for terminals"
    first, second = sorted((tmp_path / "runs").glob("torchrun-*"))
    assert "broken on purpose" in said
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


class Plain:
    """Two workers that a shell starts, as Slurm would: nobody but the environment tells them who they are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}

    def start(self, rank: int, *words: str, script: Path = SCRIPTS / "train.py") -> subprocess.Popen[bytes]:
        """Begin with one of them; its standard error is a file in its own folder."""
        own = self.folder / f"host{rank}"
        own.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "paceline", "train", str(script), *words]
        env = environment(self.folder) | self._place | {"RANK": str(rank)}
        with self.said(rank).open("w") as said:
            return subprocess.Popen(command, cwd=own, env=env, stderr=said)

    def said(self, rank: int) -> Path:
        return self.folder / f"host{rank}" / "said"

    def until_open(self) -> Path:
        """Wait for rank 0 to have told where the run is."""
        wait_until(lambda: self.said(0).read_text().startswith("run runs/torchrun-"), "rank 0 has begun")
        return (self.folder / "host0" / "runs" / "latest").resolve()

    def kill(self) -> None:
        """Everything at once, the store too."""
        for process in strays(self.folder):
            os.kill(int(process.name), signal.SIGKILL)
        wait_until(lambda: not strays(self.folder), "all are killed", 20)


@pytest.mark.long
def test_killed_as_a_whole_workers_of_a_shell_go_on_from_a_checkpoint(lab: Lab, tmp_path: Path) -> None:
    """At the same port, and rank 1 where the folder of the run is not to be found."""
    case = ("--", "momentum", *SIZES, "--shuffle")
    near = lab.trained("train.py", *case[1:], workers=2, protocol="bsp", seed=5)
    shell, flags = Plain(tmp_path), ("-p", "bsp", "--seed", "5", "--checkpoint-every", "3")
    pause = ("--pause", str(tmp_path / "go on"), "--before", "9")
    killed = [shell.start(0, *flags, *case, *pause)]
    first = shell.until_open()
    killed.append(shell.start(1, *flags, *case, *pause))  # late
    wait_until(lambda: saved_in(first) is not None, "a checkpoint is on the disk")
    shell.kill()
    (tmp_path / "go on").touch()
    workers = [shell.start(rank, "--resume", str(first)) for rank in range(2)]
    assert [worker.wait(100) for worker in workers] == [0, 0], shell.said(0).read_text()
    second = shell.until_open()
    wait_until(lambda: not strays(tmp_path), "the store's process has ended", 20)
    assert second != first
    assert_equal(load_file(second / "weights.safetensors"), near.weights)
    assert [worker.wait() for worker in killed] == [-9, -9]


@pytest.mark.long
def test_a_script_that_is_missing_on_one_host_is_told_on_all(tmp_path: Path) -> None:
    shell, case = Plain(tmp_path), ("--", "momentum", *SIZES)
    workers = [shell.start(0, *case), shell.start(1, *case, script=tmp_path / "missing.py")]
    assert [worker.wait(100) for worker in workers] == [1, 2]
    wait_until(lambda: not strays(tmp_path), "the store's process has ended", 20)
    missing = f"no script at {tmp_path}/missing.py on host {socket.gethostname()}."
    assert shell.said(0).read_text().splitlines()[-1] == f"error: rank 0: {missing}"
    assert shell.said(1).read_text().splitlines()[-1] == f"error: rank 1: {missing}"


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
    monkeypatch.setattr(engine, "open_store", lambda config, secret: MeetingPoint("127.0.0.1:2", secret))
    monkeypatch.setattr(engine, "take_seat", lambda meeting, rank, config, beside: meeting)
    monkeypatch.setattr(engine, "_tell_progress", lambda folder, terminal: None)
    used = cast(MeetingPoint, engine.take_part({}, tmp_path))
    assert len(used.secret) >= 16
    assert used.secret == given or not given
    assert (used.secret.encode() in b"".join(board.values())) is written


def test_a_letter_that_was_written_before_a_restart_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    config = RunConfig(run="", folder="")
    with socket.create_server(("127.0.0.1", 0)) as store:
        ports = [free_port(), store.getsockname()[1]]
        letters = [engine.Letter(MeetingPoint(f"127.0.0.1:{port}", "a secret"), config) for port in ports]
        board = Letters([msgspec.json.encode(letter) for letter in letters])
        assert engine._read(board) == letters[1]
    assert not board


class Letters(list[bytes]):
    """A board on which the next letter appears when the one before is taken away."""

    def get(self, key: str) -> bytes:
        assert key == "paceline/letter/1"
        return self[0]

    def set_timeout(self, patience: timedelta) -> None:
        assert patience > timedelta(seconds=engine.SAVING_S)

    def delete_key(self, key: str) -> None:
        assert key == "paceline/letter/1"
        del self[0]


def test_what_keeps_rank_0_from_beginning_is_told_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    board = Board()
    monkeypatch.setattr(engine, "_board", lambda: board)
    with pytest.raises(ConfigError), engine.telling():
        raise ConfigError("no checkpoint there.")
    assert board == {f"paceline/letter/{other}": b"error no checkpoint there." for other in (1, 2)}


def test_ddp_around_a_model_of_a_run_under_torchrun_is_refused(tmp_path: Path) -> None:
    """There init_process_group works, and DDP would make a lockstep of every protocol."""
    status, shown = torchrun_at_a_terminal(tmp_path, str(SCRIPTS / "doubly.py"), "--how", "after")
    assert status != 0, shown
    assert "is around a model that the run trains" in shown
    (folder,) = (tmp_path / "runs").glob("torchrun-*")
    assert events(folder, Decided) == []
