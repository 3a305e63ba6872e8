"""Workers that are killed: the others go on, and no work is lost or done twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest

from paceline.protocols import PACED
from paceline.store.disk.folders import saved_in
from paceline.trace import read_trace
from paceline.trace.events import RunEnded, WorkerLeft
from paceline.trace.life import owner_of
from support.command import error_lines, start_command
from support.runs import SCRIPTS, Lab, Running, once, wait_until
from support.tensors import assert_finite

WORKERS, SAMPLES, BATCH, EPOCHS = 4, 240, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
ENDLESS = ("--epochs", 100_000)
DIALS = {"workers": WORKERS, "device_time_s": 0.003, "slow": {3: 2.0}}


def doomed(random: Random) -> list[int]:
    """One worker or several, but not all."""
    return random.sample(range(WORKERS), random.randint(1, WORKERS - 1))


def kill_them(lab: Lab, running: Running, victims: list[int], random: Random) -> None:
    """Let all go on, and kill these, each at an instant of its own in its next few iterations."""
    lab.until_paused(1)  # the others may wait for a round that this one is missing in
    lab.go_on()
    for rank in victims:
        time.sleep(random.uniform(0, 0.02))
        running.kill(rank)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("protocol", sorted(PACED))
def test_whoever_is_killed_whenever_every_position_is_used_exactly_once(
    lab: Lab, protocol: str, seed: int
) -> None:
    random = Random(f"{protocol}/{seed}")
    victims = doomed(random)
    pause = lab.pause(random.randint(1, 12), *victims)
    running = lab.start("train.py", "momentum", *SIZES, *pause, protocol=protocol, **DIALS)
    kill_them(lab, running, victims, random)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.died == set(victims)
    assert {failure.worker for failure in run.result.failures} == run.died
    assert all(run.ended.statuses[rank] == -signal.SIGKILL for rank in run.died)
    assert_finite(run.weights)


@pytest.mark.parametrize("protocol", sorted(PACED))
def test_the_work_of_those_killed_at_the_very_end_is_done_by_the_last_one(
    lab: Lab, protocol: str, tmp_path: Path
) -> None:
    """One batch each, and three of four die over it: who is done at the planned end waits for the others."""
    running = lab.start("stall.py", tmp_path, workers=WORKERS, protocol=protocol)
    wait_until(lambda: len(list(tmp_path.glob("stalled*"))) == 3, "three have stalled")
    running.until_pushes(1)
    for rank in (0, 1, 2):
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert run.used() == once(1, 16)
    assert run.died == {0, 1, 2}


def test_work_loaded_ahead_by_a_killed_worker_is_dispensed_again(lab: Lab) -> None:
    """Each of its DataLoader's own workers has fetched batches that will never be trained on there."""
    args = ("momentum", *SIZES, "--load-workers", 2, *lab.pause(3))
    running = lab.start("train.py", *args, protocol="asp", **DIALS)
    lab.until_paused(WORKERS)
    running.kill(0)
    lab.go_on()
    run = lab.finish(running)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.died == {0}
    assert [left.unfinished for left in run.of(WorkerLeft) if left.worker == 0] != [0]


def test_on_failure_stop_ends_the_run_and_leaves_a_checkpoint(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", *ENDLESS, protocol="ssp", on_failure="stop", **DIALS)
    running.until_pushes(10)
    running.kill(2)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert "rank 2 died" in run.end.detail
    assert not run.end.user_mistake
    assert (run.folder / "checkpoint" / "state.json").is_file()
    assert_finite(run.weights)


def test_when_all_workers_are_killed_the_run_fails_and_says_so(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", *ENDLESS, protocol="bsp", **DIALS)
    running.until_pushes(10)
    for rank in range(WORKERS):
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "failed"
    assert run.end.detail == "every worker failed"
    assert {failure.worker for failure in run.result.failures} == set(range(WORKERS))
    assert_finite(run.weights)


def test_when_the_store_is_killed_its_workers_end_with_a_clear_error(lab: Lab) -> None:
    running = lab.start("train.py", "momentum", *ENDLESS, protocol="bsp", **DIALS)
    running.until_pushes(5)
    os.kill(running.store_pid, signal.SIGKILL)
    run = lab.finish(running)
    assert run.ended.store_status == -signal.SIGKILL
    for rank in range(WORKERS):
        assert run.ended.statuses[rank] == 1
        assert "the store is gone" in run.log(f"rank{rank}")


def test_when_the_store_is_killed_the_command_writes_the_end_and_says_how_to_go_on(
    lab: Lab, tmp_path: Path
) -> None:
    flags = ("--workers", 2, "--checkpoint-every", 5)
    command = start_command("train", SCRIPTS / "train.py", *flags, "--", "momentum", *ENDLESS, cwd=tmp_path)
    latest = tmp_path / "runs/latest"
    wait_until(lambda: saved_in(latest) is not None, "there is a checkpoint")
    owner = owner_of(latest)
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    _, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    (error,) = error_lines(errors)
    assert "the store ended by SIGKILL" in error
    assert f"Go on with: paceline train {SCRIPTS / 'train.py'} --resume runs/" in error
    result = json.loads((latest / "result.json").read_text())
    assert (result["status"], result["failures"]) == ("failed", [])
    *_, last = read_trace(latest)
    assert isinstance(last, RunEnded)
    wait_until(lambda: lab.leftovers() <= lab.idle, "everything is gone", 20)
