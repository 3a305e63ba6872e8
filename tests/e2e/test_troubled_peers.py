"""Peers in trouble: whoever dies, stops or brings NaN, the others finish, or the run says who it was."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline.trace.events import Note
from support.runs import Lab, once, wait_until
from support.tensors import assert_finite
from support.tight import TIGHT, every_peer


@pytest.mark.parametrize("seed", range(2))
@every_peer
def test_whoever_is_killed_whenever_the_others_finish_all_the_work(
    lab: Lab, protocol: str, seed: int
) -> None:
    random = Random(f"{protocol}/{seed}")
    dials: dict[str, Any] = {"workers": 4, "device_time_s": 0.003, "slow": {3: 2.0}}
    sizes = ("--samples", 240, "--batch", 4, "--epochs", 3)
    settings = TIGHT.get(protocol, {})
    victims = random.sample(range(4), random.randint(1, 3))
    args = ("momentum", *sizes, *lab.pause(random.randint(1, 12), *victims))
    running = lab.start("train.py", *args, protocol=protocol, settings=settings, **dials)
    lab.until_paused(1)
    lab.go_on()
    for rank in victims:
        time.sleep(random.uniform(0, 0.02))
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(3, 240)
    assert run.died == set(victims)
    assert all(run.ended.statuses[rank] == -signal.SIGKILL for rank in run.died)
    assert_finite(run.weights)


@every_peer
def test_who_waits_in_a_meeting_goes_on_when_those_it_waits_for_are_killed(
    lab: Lab, protocol: str, tmp_path: Path
) -> None:
    """One batch each; three never finish theirs and die over it, and the last one does all the work."""
    settings = TIGHT.get(protocol, {}) | ({"period": 1} if "period" in TIGHT.get(protocol, {}) else {})
    running = lab.start("stall.py", tmp_path, workers=4, protocol=protocol, settings=settings)
    wait_until(lambda: len(list(tmp_path.glob("stalled*"))) == 3, "three have stalled")
    running.until_pushes(1)
    for rank in (0, 1, 2):
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(1, 16)
    assert run.died == {0, 1, 2}


def test_workers_that_name_different_families_are_told_so(lab: Lab, in_scripts: Any) -> None:
    script = in_scripts(
        "import os, sys, paceline\n"
        "from cases import CASES\n"
        "pace = paceline.join(*(['local_sgd'] if paceline.runtime.seat.mine().rank else []))\n"
        "model, optimizer = CASES['momentum'].build()\n"
        "pace.prepare(model, optimizer)\n"
    )
    run = lab.run(script, workers=2)
    assert run.end.user_mistake
    assert "rank 0 does not run protocol 'local_sgd' as the others do" in run.end.detail


def test_a_flag_that_means_nothing_to_peers_is_told(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", workers=2, protocol="allreduce", weighting="sum")
    assert "--weighting is ignored: under 'allreduce' every worker steps by itself" in str(run.of(Note))


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd", "dpsgd"])
def test_on_failure_stop_ends_the_run_with_the_rank_named(lab: Lab, protocol: str) -> None:
    sizes = ("--epochs", 100_000)
    dials: dict[str, Any] = {"workers": 3, "device_time_s": 0.003, "on_failure": "stop"}
    running = lab.start("train.py", "momentum", *sizes, protocol=protocol, **dials)
    running.until_pushes(10)
    running.kill(2)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert "rank 2 died" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_a_gradient_that_is_not_finite_stops_the_run_with_rank_and_parameter_named(
    lab: Lab, protocol: str
) -> None:
    run = lab.run("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol)
    assert run.result.status == "failed"
    assert "rank 1" in run.end.detail
    assert "NaN or infinity" in run.end.detail
    assert "'0.weight'" in run.end.detail


@pytest.mark.parametrize("protocol", ["allreduce", "local_sgd"])
def test_or_is_skipped_and_counted(lab: Lab, protocol: str) -> None:
    run = lab.trained("peers.py", "momentum", "--bad", 1, workers=3, protocol=protocol, bad_gradient="skip")
    assert_finite(run.weights)
    assert "rank 1: 1 gradients were not finite and were skipped" in str(run.trace)


def test_a_stopped_run_saves_the_mean_beside_its_checkpoint(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", "--epochs", 100_000, workers=2, protocol="local_sgd")
    running.until_pushes(10)
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped"
    assert_finite(run.weights)
    assert {path.name for path in (run.folder / "checkpoint").glob("rank*.json")} == {
        "rank0.json",
        "rank1.json",
    }
    assert not list(run.folder.glob("*.partial"))
