"""A mesh stays on one host, whoever places its workers: refused in one sentence, and nothing is trained."""

from __future__ import annotations

import pytest

from paceline.config import RunConfig
from paceline.engines.meeting import MeetingPoint, take_seat
from paceline.engines.torchrun import _listening
from paceline.errors import ConfigError

SAID = (
    r"the mesh stage=2 would reach over several hosts \({}\), where its groups \(gloo\) take in whoever"
    r" connects, and its conductor shares memory with all workers\. Place all 2 workers on the host .*, or "
    r"train over hosts without --mesh\."
)


def config() -> RunConfig:
    return RunConfig(run="a", folder="a", script="a.py", workers=2, mesh={"stage": 2})


def test_torchrun_on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _listening(config()).listen is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match=SAID.format("torchrun started 1 of 2 workers here")):
        _listening(config())


def test_a_worker_that_an_engine_placed_where_the_conductor_is_not() -> None:
    with pytest.raises(ConfigError, match=SAID.format("rank 1 is on .*, the conductor is not")):
        take_seat(MeetingPoint("192.0.2.9:1", "secret"), 1, config())
