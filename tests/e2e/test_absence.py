"""The store's process is stopped for a while: whoever was well before is not blamed for that."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.engines.local import LocalEngine
from paceline.trace.events import Silent
from support.hosts import Apart
from support.runs import Lab, Run, once

SIZES = ("--samples", 120, "--batch", 4, "--epochs", 3)
STOPPED_S = 3.5
DIALS: dict[str, Any] = {"workers": 3, "device_time_s": 0.05, "stuck_after": "2s:drop"}
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def elsewhere(warm_lab: Lab) -> Iterator[LocalEngine]:
    """The second host's engine."""
    engine = LocalEngine()
    warm_lab.further.add(engine._process.pid)
    yield engine
    warm_lab.further.discard(engine._process.pid)
    engine.close()


def stop_for_a_while(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    os.kill(pid, signal.SIGCONT)


def assert_nobody_is_blamed(run: Run) -> None:
    assert run.result.status == "finished", run.end.detail
    assert run.result.failures == []
    assert run.of(Silent) == []
    assert run.used() == once(3, 120)


@pytest.mark.parametrize("protocol", ["bsp", "asp", "local_sgd"])
def test_an_owner_that_was_stopped_drops_nobody_for_its_own_absence(lab: Lab, protocol: str) -> None:
    running = lab.start("train.py", "momentum", *SIZES, protocol=protocol, **DIALS)
    running.until_pushes(9)
    stop_for_a_while(running.store_pid)
    assert_nobody_is_blamed(lab.finish(running))


@pytest.mark.parametrize("protocol", ["asp", "local_sgd"])
def test_nor_workers_of_another_host_whose_wire_was_cut_meanwhile(
    lab: Lab, elsewhere: LocalEngine, protocol: str
) -> None:
    asked = ("train.py", "momentum", *SIZES)
    apart = Apart(lab, elsewhere, *asked, here=1, protocol=protocol, host_patience_s=3.0, **DIALS)
    apart.host(2)
    apart.running.until_pushes(9)
    apart.wire.cut()
    stop_for_a_while(apart.running.store_pid)
    assert_nobody_is_blamed(apart.finish())
