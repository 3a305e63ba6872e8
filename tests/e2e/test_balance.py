"""Balanced runs with real processes: sizes follow speed, and nothing else changes."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
import torch

from e2e.scripts.cases import CASES, large_batch
from paceline.protocols import PACED
from paceline.trace.events import Decided, Note, RunStarted
from support.runs import Lab, Run, Running, once, wait_until
from support.tensors import assert_close, assert_equal

WORKERS, SAMPLES, BATCH, EPOCHS = 4, 400, 10, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
LONGER = (*SIZES[:4], "--epochs", 10)
UNEQUAL: dict[str, Any] = {
    "workers": WORKERS,
    "balance": True,
    "device_time_s": 0.01,
    "slow": {3: 2.5},
}
"""Rank 3 is two and a half times slower than the others, and so should get four tenths of their batch."""


def rounds(run: Run) -> list[list[int]]:
    """The positions behind every step of a run in lockstep, in the order of the loader."""
    steps: list[list[int]] = []
    held: dict[int, list[int]] = {}
    for event in run.of(Decided):
        if event.pushed is not None:
            held[event.pushed] = [i for _, first, size in event.work for i in range(first, first + size)]
        if event.flushed:
            steps.append([i for rank in event.flushed for i in held.pop(rank)])
    return steps


def last_sizes(run: Run, epoch: int = EPOCHS - 1) -> dict[int, int]:
    """The largest batch each rank had in the last epoch: those at its end may be short."""
    sizes: dict[int, int] = {}
    for push in run.pushes:
        for at, _, count in push.work:
            if at == epoch:
                sizes[push.pushed] = max(sizes.get(push.pushed, 0), count)
    return sizes


def assert_slow_has_less(sizes: dict[int, int]) -> None:
    """How much less depends on what else the machine does."""
    others = [size for rank, size in sizes.items() if rank != 3]
    assert sizes[3] < min(BATCH, *others)
    assert max(others) > BATCH


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_balanced_bsp_equals_one_process_with_the_batches_of_a_round_as_one(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, protocol="bsp", **UNEQUAL)
    steps = rounds(run)
    assert_close(run.weights, large_batch(CASES[name], SAMPLES, steps), 1e-11)
    assert len({push.samples for push in run.pushes}) > 2, "all batches were alike, so this proved nothing"
    assert run.used() == once(EPOCHS, SAMPLES)


def test_a_round_of_balanced_bsp_is_as_large_as_without_balance(lab: Lab) -> None:
    """But for the rounds in which an epoch ends: there one batch is short."""
    run = lab.trained("train.py", "momentum", *SIZES, protocol="bsp", **UNEQUAL)
    sizes = [len(step) for step in rounds(run)]
    assert max(sizes) == WORKERS * BATCH
    assert sum(size == WORKERS * BATCH for size in sizes) >= len(sizes) - EPOCHS
    assert {push.lr_scale for push in run.pushes if push.flushed} == {1.0}


@pytest.mark.parametrize("protocol", ["bsp", "ssp", "asp"])
def test_sizes_follow_speed_and_every_change_is_noted(lab: Lab, protocol: str) -> None:
    run = lab.trained("train.py", "momentum", *SIZES, protocol=protocol, **UNEQUAL)
    assert_slow_has_less(last_sizes(run))
    assert any("balanced: batches of" in note.text for note in run.of(Note))
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.of(RunStarted)[0].balance
    assert run.result.balance


def test_an_epoch_moves_the_weights_as_far_however_it_is_split(lab: Lab) -> None:
    """Steps of pushes applied alone are samples / (batch x workers), so they add up to the same."""
    run = lab.trained("train.py", "sgd", *SIZES, protocol="asp", **UNEQUAL)
    everybody = [p for p in run.pushes if p.samples == BATCH]
    assert {push.lr_scale for push in everybody[:4]} == {1 / WORKERS}
    before_the_end = [push for push in run.pushes if push.work[0][0] < EPOCHS - 1]
    for push in before_the_end:
        assert push.lr_scale == pytest.approx(push.samples / (BATCH * WORKERS))
    moved = sum(push.lr_scale for push in before_the_end)
    assert moved == pytest.approx((EPOCHS - 1) * SAMPLES / (BATCH * WORKERS))


def test_with_weighting_sum_every_sample_counts_once_however_it_is_split(lab: Lab) -> None:
    """A mean of n samples, times n / batch: with a gradient that is the sample itself, sums are known."""
    dials = UNEQUAL | {"weighting": "sum", "device_time_s": 0.005}
    run = lab.trained("balanced_mean.py", protocol="asp", **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - 2 * x.sum(0) / BATCH)
    assert len({push.samples for push in run.pushes}) > 2


@pytest.mark.parametrize("protocol", ["bsp", "dssp"])
def test_after_a_kill_the_others_share_the_work_by_their_speed(lab: Lab, protocol: str) -> None:
    pause = lab.pause(12, 1, only=1)
    running = lab.start("train.py", "momentum", *SIZES, *pause, protocol=protocol, **UNEQUAL)
    lab.until_paused(1)
    until_balanced(running)
    running.kill(1)
    run = lab.finish(running)
    assert run.result.status == "finished"
    assert run.died == {1}
    assert run.used() == once(EPOCHS, SAMPLES)
    assert_slow_has_less(last_sizes(run))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("protocol", sorted(PACED))
def test_whoever_is_killed_whenever_every_position_is_used_exactly_once(
    lab: Lab, protocol: str, seed: int
) -> None:
    random = Random(f"balance/{protocol}/{seed}")
    victims = random.sample(range(WORKERS), random.randint(1, WORKERS - 1))
    args = ("momentum", *SIZES, *lab.pause(random.randint(1, 8), *victims))
    running = lab.start("train.py", *args, protocol=protocol, **UNEQUAL | {"device_time_s": 0.004})
    lab.until_paused(1)
    lab.go_on()
    for rank in victims:
        time.sleep(random.uniform(0, 0.02))
        running.kill(rank)
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    assert run.died == set(victims)
    assert run.used() == once(EPOCHS, SAMPLES)


def until_balanced(running: Running) -> None:
    wait_until(lambda: running.events(Note) > 0, "sizes have changed")


def stopped(lab: Lab, protocol: str) -> Run:
    """A run that is stopped once its sizes follow its speeds; more than five seconds would be left."""
    dials = UNEQUAL | {"device_time_s": 0.05}
    running = lab.start("train.py", "momentum", *LONGER, protocol=protocol, **dials)
    until_balanced(running)
    running.stop()
    run = lab.finish(running)
    assert run.result.status == "stopped"
    return run


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_a_stopped_run_goes_on_balanced_loses_no_position_and_can_be_replayed(
    lab: Lab, protocol: str
) -> None:
    first = stopped(lab, protocol)
    resume = str(first.folder / "checkpoint")
    dials = UNEQUAL | {"device_time_s": 0.002, "resume": resume}
    second = lab.trained("train.py", "momentum", *LONGER, protocol=protocol, **dials)
    assert first.used() + second.used() == once(10, SAMPLES)
    begins = {p.pushed: p.samples for p in reversed(second.pushes) if p.clock <= 3 and p.pushed is not None}
    assert begins[3] < BATCH < max(begins.values()), "the speeds were forgotten"
    again = lab.trained(
        "train.py",
        "momentum",
        *LONGER,
        protocol=protocol,
        workers=WORKERS,
        balance=True,
        resume=resume,
        replay=str(second.folder),
    )
    assert_equal(again.weights, second.weights)


def test_a_balanced_run_may_be_resumed_without_balance(lab: Lab) -> None:
    first = stopped(lab, "asp")
    resume = str(first.folder / "checkpoint")
    second = lab.trained("train.py", "momentum", *LONGER, workers=2, protocol="ssp", resume=resume)
    assert first.used() + second.used() == once(10, SAMPLES)
    assert max(push.samples for push in second.pushes) == BATCH


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_a_balanced_run_is_replayed_to_the_same_bits(lab: Lab, protocol: str) -> None:
    run = lab.trained("train.py", "adamw", *SIZES, protocol=protocol, **UNEQUAL)
    again = lab.trained(
        "train.py", "adamw", *SIZES, protocol=protocol, workers=WORKERS, balance=True, replay=str(run.folder)
    )
    assert_equal(again.weights, run.weights)
    assert [push.work for push in again.pushes] == [push.work for push in run.pushes]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("protocol", ["bsp", "asp"])
def test_a_run_with_a_death_is_replayed_to_the_same_bits(lab: Lab, protocol: str, balance: bool) -> None:
    """What the dead one left is on record as the work of whoever took it over."""
    dials = UNEQUAL | {"balance": balance, "protocol": protocol}
    running = lab.start("train.py", "momentum", *SIZES, *lab.pause(8, 2), **dials)
    lab.until_paused(1)
    lab.go_on()
    running.kill(2)
    run = lab.finish(running)
    assert run.died == {2}
    again = lab.run(
        "train.py",
        "momentum",
        *SIZES,
        protocol=protocol,
        workers=WORKERS,
        balance=balance,
        replay=str(run.folder),
    )
    assert_equal(again.weights, run.weights)
    assert [push.work for push in again.pushes] == [push.work for push in run.pushes]


@pytest.mark.parametrize("load_workers", [0, 2])
def test_shuffled_loaders_with_their_own_processes_are_balanced_too(lab: Lab, load_workers: int) -> None:
    args = (*SIZES, "--shuffle", "--load-workers", load_workers)
    run = lab.trained("train.py", "momentum", *args, protocol="bsp", **UNEQUAL)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert last_sizes(run)[3] < BATCH


def test_with_drop_last_the_same_positions_are_left_out(lab: Lab) -> None:
    dials = UNEQUAL | {"workers": 3, "slow": {2: 2.5}, "device_time_s": 0.002}
    run = lab.trained("loaders.py", "drop_last", protocol="asp", **dials)
    assert run.used() == once(3, 60 // 7 * 7)


@pytest.mark.parametrize(
    ("kind", "words"), [("stream", "iterable dataset"), ("batches", "batch sampler of its own")]
)
def test_a_loader_whose_batches_cannot_be_cut_is_refused(lab: Lab, kind: str, words: str) -> None:
    run = lab.run("loaders.py", kind, workers=3, balance=True)
    assert run.result.status == "failed"
    assert run.end.user_mistake
    assert words in run.end.detail
    assert "leave --balance out" in run.end.detail


def test_one_worker_has_nothing_to_balance_and_stays_plain_pytorch(lab: Lab) -> None:
    balanced = lab.trained("train.py", "momentum", *SIZES, workers=1, balance=True)
    plain = lab.trained("train.py", "momentum", *SIZES, workers=1)
    assert_equal(balanced.weights, plain.weights)
