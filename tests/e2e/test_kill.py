"""Workers that are killed: the others go on, and no work is lost or done twice."""

from __future__ import annotations

import os
import signal
import time
from random import Random

import pytest
import torch

from e2e.scripts.cases import CASES
from paceline.protocols import PROTOCOLS
from support.runs import Lab, Run, Running, once, wait_until

WORKERS, SAMPLES, BATCH, EPOCHS = 4, 240, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
DIALS = {"workers": WORKERS, "device_time_s": 0.003, "slow": {3: 2.0}}
TYPICAL_S = 0.3
"""About as long as such a run trains on a quiet machine."""


def kill_some(running: Running, random: Random) -> set[int]:
    """Kill one worker or several, but not all, each at an instant of its own."""
    running.until_training()
    victims = random.sample(range(WORKERS), random.randint(1, WORKERS - 1))
    begin = time.monotonic()
    for at, rank in sorted((random.uniform(0, TYPICAL_S), rank) for rank in victims):
        time.sleep(max(0.0, begin + at - time.monotonic()))
        running.kill(rank)
    return set(victims)


def assert_finite(run: Run) -> None:
    assert all(bool(torch.isfinite(tensor).all()) for tensor in run.weights.values())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("protocol", sorted(PROTOCOLS))
def test_whoever_is_killed_whenever_every_position_is_used_exactly_once(
    lab: Lab, protocol: str, seed: int
) -> None:
    running = lab.start("train.py", "momentum", *SIZES, protocol=protocol, **DIALS)
    victims = kill_some(running, Random(f"{protocol}/{seed}"))
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.died <= victims
    assert {failure.worker for failure in run.result.failures} == run.died
    assert all(run.ended.statuses[rank] == -signal.SIGKILL for rank in run.died)
    assert_finite(run)
