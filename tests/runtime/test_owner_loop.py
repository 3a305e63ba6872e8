"""The owner's loop, with workers that are played here: they misbehave, and the run ends all the same."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.fabric.neighbours import wait_for_neighbours
from paceline.runtime.messages import workers as m
from paceline.runtime.owner import loop as loops
from paceline.runtime.owner.loop import RealLoop
from paceline.runtime.owner.owner import Owner
from paceline.trace import read_trace
from paceline.trace.events import RunEnded, WorkerLeft


class Stage:
    """An owner, and for each worker a process that only sleeps and the other end of its channel."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        pairs = [Channel.pair() for _ in range(workers)]
        self.sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(workers)]
        self.ends = [Channel(theirs) for _, theirs in pairs]
        self.stop = os.eventfd(0)
        self.owner = Owner(RunConfig(run="r", folder=str(folder), workers=workers), time.monotonic)
        places = [(Channel(mine), p.pid) for (mine, _), p in zip(pairs, self.sleepers, strict=True)]
        self.loop = RealLoop(self.owner, places, self.stop)
        self.folder = folder

    def end(self) -> RunEnded:
        """Run to the end, and say how it was."""
        self.loop.run()
        self.owner.close()
        *_, last = read_trace(self.folder)
        assert isinstance(last, RunEnded)
        return last

    def close(self) -> None:
        for process in self.sleepers:
            process.kill()
            process.wait()
        for end in self.ends:
            end.close()
        os.close(self.stop)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.close()


def test_a_worker_that_does_not_end_when_told_is_killed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.2)
    os.eventfd_write(stage.stop, 1)
    ended = stage.end()
    assert (ended.status, ended.detail) == ("stopped", "interrupted")
    assert all(process.wait() == -9 for process in stage.sleepers)


def test_who_is_asleep_when_the_run_is_stopped_is_told_at_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.2)
    stage.ends[0].send(m.Hello(stage.sleepers[0].pid, "spp", {}))
    assert stage.end().user_mistake
    received = stage.ends[0].receive(m.store_decoder)
    assert received is not None
    assert isinstance(received[0], m.Halt)
    assert "Did you mean 'ssp'?" in received[0].text


def test_a_worker_that_talks_nonsense_is_lost_and_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.2)
    stage.ends[1]._sock.send(b"\xff\xfe nonsense")
    stage.sleepers[0].kill()  # else it would be waited for: the run goes on without rank 1
    ended = stage.end()
    assert (ended.status, ended.detail) == ("failed", "every worker failed")
    left = [event for event in read_trace(stage.folder) if isinstance(event, WorkerLeft)]
    assert any(x.worker == 1 and "a message of 11 bytes that is not ours" in x.detail for x in left)


@pytest.mark.parametrize(
    "message",
    [m.Push(0.1, 4), m.Draw(), m.Linger(0), m.Away(), m.Back({}, 0.0)],
    ids=lambda x: type(x).__name__,
)
def test_what_comes_before_training_began_ends_the_run_and_not_the_owner(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, message: m.FromWorker
) -> None:
    monkeypatch.setattr(loops, "GRACE_S", 0.2)
    stage.ends[0].send(message)
    ended = stage.end()
    assert ended.status == "failed"
    assert "before it was ready" in ended.detail


def test_a_store_whose_workers_never_come_ends_and_says_how_many_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "GATHER_S", 0.2)
    owner = Owner(RunConfig(run="run", folder=str(tmp_path), workers=2), time.monotonic)
    listener = wait_for_neighbours(f"nobody-{os.getpid()}")
    assert listener is not None
    with listener:
        RealLoop(owner, [], listener=listener).run()
    owner.close()
    ended = list(read_trace(tmp_path))[-1]
    assert isinstance(ended, RunEnded)
    assert ended.status == "failed"
    assert ended.detail == "0 of 2 workers came within 0.2 s."
