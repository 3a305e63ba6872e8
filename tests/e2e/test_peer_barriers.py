"""PSP without a middle, in real processes: every worker decides for itself when it goes on."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from e2e.scripts.cases import CASES
from e2e.test_equals_pytorch import plain_pytorch
from paceline.trace.events import Decided, Evaluated, Passed, WorkerLeft
from support.runs import Lab, Run, once, wait_until
from support.tensors import assert_equal, assert_finite, threads

WORKERS, SAMPLES, BATCH, EPOCHS = 4, 96, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
ALL = {"form": "distributed", "sample": WORKERS - 1, "poll_s": 0.002}
SLOWED = {"workers": WORKERS, "device_time_s": 0.002, "jitter": 0.5, "slow": {3: 4.0}, "protocol": "psp"}
pytestmark = pytest.mark.timeout(120)

BEGIN = """
import sys, time
from pathlib import Path
import paceline
from torch import nn, optim, randn
from torch.utils.data import DataLoader, TensorDataset

pace = paceline.join()
model = nn.Linear(4, 1)
optimizer, data = optim.SGD(model.parameters(), lr=0.01), TensorDataset(randn(48, 4))
model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(data, batch_size=2))
for epoch in pace.epochs(3):
    for (x,) in loader:
"""
EVALUATES = f"""{BEGIN}
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    pace.evaluate(lambda model: 1.0)
"""
STALLS = f"""{BEGIN}
        while pace.rank == 1 and not Path(sys.argv[1]).exists():
            time.sleep(0.01)
        model(x).square().mean().backward()
        optimizer.step()
"""


def gaps(run: Run) -> list[int]:
    """How far ahead of the slowest each worker was when it went on, while all took part: counted here."""
    clock, found = Counter(dict.fromkeys(range(WORKERS), 0)), []
    for event in run.trace:
        if isinstance(event, WorkerLeft):
            break
        if isinstance(event, Decided):
            clock.update([] if event.pushed is None else [event.pushed])
            found += [clock[worker] - min(clock.values()) for worker in event.release]
    return found


def held_up(lab: Lab, staleness: int = 0) -> Run:
    """A run in which the slow worker waits until the others can do nothing but wait for it."""
    args = ("momentum", *SIZES, *lab.pause(4, only=3))
    running = lab.start("train.py", *args, settings=ALL | {"staleness": staleness}, **SLOWED)
    lab.until_paused(1)
    running.until_pushes(3 + 3 * (4 + staleness))
    lab.go_on()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    return run


@pytest.mark.parametrize("staleness", [0, 2])
def test_who_asks_all_others_is_never_further_ahead_than_the_staleness(lab: Lab, staleness: int) -> None:
    run = held_up(lab, staleness)
    assert max(gaps(run)) == staleness, "more than promised, or nobody came as far as it may"
    assert run.result.max_clock_gap == staleness
    assert run.used() == once(EPOCHS, SAMPLES)


def test_a_wait_is_on_record_with_its_looks_and_questions(lab: Lab) -> None:
    run = held_up(lab)
    passed = run.of(Passed)
    assert len(passed) == len(run.pushes)
    assert all(event.asked <= event.looks * (WORKERS - 1) for event in passed)
    assert max(event.looks for event in passed) > 1
    assert run.result.barrier_looks == sum(event.looks for event in passed)
    assert run.result.barrier_questions == sum(event.asked for event in passed)
    fast, slow = run.result.waiting_share[0], run.result.waiting_share[3]
    assert fast > slow


def test_whom_all_wait_for_may_be_killed_and_nobody_hangs(lab: Lab) -> None:
    """Without staleness all others are at their barriers, asleep, because of the one that is killed."""
    dials = SLOWED | {"slow": {3: 6000.0}}
    running = lab.start("train.py", "momentum", *SIZES, settings=ALL, **dials)
    running.until_pushes(WORKERS - 1)
    running.kill(3)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == {3}
    assert run.used() == once(EPOCHS, SAMPLES)
    assert_finite(run.weights)


def test_who_is_asleep_at_its_barrier_is_woken_when_the_run_is_stopped(lab: Lab) -> None:
    """It would look again long after this test is given up; the store kills who does not end by itself."""
    go_on = lab.root / "go on"
    running = lab.start(
        lab.script(STALLS), go_on, settings=ALL | {"poll_s": 1000.0}, workers=2, protocol="psp"
    )
    running.until_pushes(1)
    running.stop()
    wait_until(lambda: running.events(WorkerLeft) > 0, "who slept has left")
    go_on.touch()
    run = lab.finish(running)
    assert run.result.status == "stopped"
    assert run.ended.statuses == {0: 0, 1: 0}


def test_who_evaluates_is_not_waited_for_and_comes_back_at_the_clock_of_the_slowest(lab: Lab) -> None:
    run = lab.trained(lab.script(EVALUATES), settings=ALL, workers=3, protocol="psp", slow={2: 2.0})
    assert len(run.of(Evaluated)) == 3
    assert run.result.max_clock_gap == 0
    assert run.used() == once(3, 48)


def test_one_worker_equals_plain_pytorch_bit_for_bit(lab: Lab) -> None:
    sizes = ("--samples", 50, "--batch", 4, "--epochs", 3, "--shuffle")
    run = lab.trained("train.py", "noisy", *sizes, workers=1, protocol="psp", settings=ALL)
    with threads(os.cpu_count() or 1):
        assert_equal(run.weights, plain_pytorch(CASES["noisy"]))
