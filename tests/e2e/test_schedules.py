"""Learning rate schedules: once per epoch as they are, once per iteration by the run's progress."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from e2e.scripts.cases import CASES, in_rounds
from paceline.trace.events import Reported
from support.runs import Lab, Run
from support.tensors import assert_close, assert_equal

SAMPLES, BATCH, EPOCHS = 48, 4, 3


def reference(how: str, workers: int) -> dict[str, Tensor]:
    """One process with the large batch, and a scheduler stepped as in its script."""
    case = CASES["momentum"]
    model, optimizer = case.build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, y = case.samples(SAMPLES)
    count = 0
    for epoch in range(EPOCHS):
        for indices in in_rounds(SAMPLES, BATCH, workers, 1):
            case.iteration(model, optimizer, x[indices], y[indices])
            count += 1
            if how == "iteration" or (how == "phases" and epoch) or (how == "every" and count % 3 == 0):
                scheduler.step()
        if "epoch" in how:
            scheduler.step()
    return model.state_dict()


def steps_reported(run: Run) -> list[int]:
    """How many times the scheduler had been stepped at each iteration."""
    rates = [event.values["lr"] for event in run.of(Reported)]
    return [round(math.log(rate / 0.1, 0.9)) for rate in rates]


WAYS = ["epoch", "iteration", "prepared epoch", "every", "phases"]
"""A scheduler that is stepped per epoch or per iteration; one that was prepared and is stepped per epoch, or
every third iteration; and one that is prepared in the middle of training."""


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("workers", [1, 2])
def test_lockstep_follows_the_schedule_of_one_process(lab: Lab, how: str, workers: int) -> None:
    run = lab.trained("schedule.py", how, EPOCHS, workers=workers, protocol="bsp")
    assert_close(run.weights, reference(how, workers), 1e-11)


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp"])
def test_a_prepared_schedule_counts_the_samples_of_all_workers(lab: Lab, protocol: str) -> None:
    """As many steps as lockstep would make, whoever did the work."""
    slow: dict[str, Any] = {"device_time_s": 0.002, "slow": {2: 4.0}}
    run = lab.trained("schedule.py", "iteration", EPOCHS, workers=3, protocol=protocol, **slow)
    rounds = SAMPLES * EPOCHS // (BATCH * 3)
    assert max(steps_reported(run)) == rounds - 1
    assert sorted(set(steps_reported(run))) == list(range(rounds))


def test_a_prepared_schedule_can_count_updates_as_published_systems_did(lab: Lab) -> None:
    dials = {"workers": 3, "protocol": "asp", "schedule": "updates"}
    run = lab.trained("schedule.py", "iteration", EPOCHS, **dials)
    updates = SAMPLES * EPOCHS // BATCH
    assert run.result.updates == updates
    assert updates - 3 <= max(steps_reported(run)) < updates


def test_an_unprepared_schedule_is_each_workers_own(lab: Lab) -> None:
    run = lab.trained("schedule.py", "epoch", EPOCHS, workers=3, protocol="asp")
    assert set(steps_reported(run)) == set(range(EPOCHS))


@pytest.mark.parametrize("protocol", ["asp", "allreduce", "local_sgd"])
def test_a_prepared_schedule_that_is_stepped_per_epoch_falls_once_per_epoch(lab: Lab, protocol: str) -> None:
    run = lab.trained("schedule.py", "prepared epoch", EPOCHS, workers=3, protocol=protocol)
    assert set(steps_reported(run)) == set(range(EPOCHS))


def test_a_prepared_schedule_that_is_told_where_it_stands_is_refused(lab: Lab) -> None:
    run = lab.run("schedule.py", "argument", EPOCHS, workers=2, protocol="bsp")
    assert run.end.user_mistake
    assert "ExponentialLR.step(0.08" in run.end.detail
    assert "Call step() without an argument" in run.end.detail


@pytest.mark.parametrize("protocol", ["asp", "local_sgd"])
def test_a_schedule_that_is_prepared_in_the_middle_begins_at_its_beginning(lab: Lab, protocol: str) -> None:
    run = lab.trained("schedule.py", "phases", 2, workers=2, protocol=protocol)
    assert max(steps_reported(run)) <= SAMPLES // BATCH // 2


@pytest.mark.parametrize("before", [4, 8, 11])
@pytest.mark.parametrize("how", [way for way in WAYS if way != "every"])
@pytest.mark.parametrize(("workers", "protocol"), [(1, "bsp"), (2, "bsp"), (2, "allreduce")])
def test_a_schedule_goes_on_after_a_resume(
    lab: Lab, how: str, workers: int, protocol: str, before: int
) -> None:
    """Stopped in the first epoch or in the second. (A script that counts iterations counts them anew.)"""
    dials: dict[str, Any] = {"workers": workers, "protocol": protocol}
    args = ("schedule.py", how, EPOCHS, lab.root / "go on", before * 2 // workers)
    running = lab.start(*args, **dials)
    lab.until_paused(workers)
    running.stop()
    (lab.root / "go on").touch()
    first = lab.finish(running)
    assert first.result.status == "stopped"
    second = lab.trained(*args, resume=str(first.folder / "checkpoint"), **dials)
    whole = lab.trained(*args, **dials)
    assert_equal(second.weights, whole.weights)
