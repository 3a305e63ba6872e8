"""A worker of a mesh whose exchange broke off: it shows what happened, whatever the conductor does."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.config import RunConfig
from paceline.fabric.channel import Channel
from paceline.parallel import messages as m
from paceline.parallel import pace as mesh_pace
from paceline.parallel.pace import MeshPace
from paceline.parallel.signs import Signs

BROKEN = RuntimeError("Connection closed by peer")


class QuietConductor:
    """Says welcome, and from then on only what a test has it say."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = Channel.pair()
        self.channel, self.worker = Channel(ours), Channel(theirs)
        signs, meeting = Signs.create(2), os.memfd_create("paceline-mesh")
        self.channel.send(m.MeshWelcome(), (meeting, signs.fd))
        os.close(meeting)
        config = RunConfig(run="a", folder=str(folder), script="a.py", workers=2, mesh={"stage": 2})
        self.pace = MeshPace(config, 1, self.worker, None, {}, _no_loop)

    def close(self) -> None:
        self.channel.close()
        for thread in threading.enumerate():
            if thread.name == "paceline-conductor":
                thread.join()
        self.worker.close()

    def heard(self) -> m.FromWorker:
        received = self.channel.receive(m.conductor_decoder)
        assert received is not None
        return received[0]


def _no_loop(*_: Any) -> Any:
    raise AssertionError("no model is prepared here")


@pytest.fixture
def conductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QuietConductor]:
    monkeypatch.setattr(mesh_pace, "WHY_S", 0.05)
    made = QuietConductor(tmp_path)
    assert made.pace.withholds(BROKEN)  # from here on a lost conductor does not end this process
    yield made
    made.close()


def test_a_worker_that_hears_no_reason_shows_what_broke_off_and_says_so(
    conductor: QuietConductor, capsys: pytest.CaptureFixture[str]
) -> None:
    conductor.pace.end(BROKEN, str(BROKEN))
    shown = capsys.readouterr().err
    assert "Connection closed by peer" in shown
    assert "rank 1: an exchange failed, and the run has not reported a reason" in shown
    conductor.heard()
    assert conductor.heard() == m.ExchangeTorn("Connection closed by peer")


@pytest.mark.parametrize("blamed", [0, 1])
def test_what_broke_off_is_shown_by_the_worker_that_is_blamed_alone(
    blamed: int,
    conductor: QuietConductor,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(mesh_pace, "WHY_S", 60.0)
    conductor.channel.send(m.EndRun(blamed))
    conductor.pace.end(BROKEN, str(BROKEN))
    assert ("Connection closed by peer" in capsys.readouterr().err) == (blamed == 1)


def test_a_worker_whose_conductor_is_gone_shows_what_broke_off(
    conductor: QuietConductor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mesh_pace, "WHY_S", 60.0)
    conductor.channel.close()
    conductor.pace.end(BROKEN, str(BROKEN))
    assert "Connection closed by peer" in capsys.readouterr().err
