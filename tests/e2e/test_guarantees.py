"""What the protocols promise, held by real workers of unequal speed."""

from __future__ import annotations

import time
from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from e2e.scripts.cases import CASES
from paceline.trace.events import Note
from support.runs import Lab, Run, once

EPOCHS, SAMPLES, BATCH, WORKERS = 3, 96, 4, 4
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)
SLOWED = {"workers": WORKERS, "device_time_s": 0.002, "jitter": 0.5, "slow": {3: 4.0}}
ASYNCHRONOUS = ["asp", "ssp", "dssp"]
LOSING_NOTHING = [
    ("elastic_bsp", {"lookahead": 3}),
    ("elastic_bsp", {"lookahead": 3, "monitor": "carry_over", "barrier_update": "immediate"}),
    ("psp", {"sample": 2, "staleness": 1}),
    ("psp", {"sample": 1, "resample": "poll", "poll_s": 0.002}),
    ("psp", {"sample": 2, "form": "distributed", "poll_s": 0.002}),
    ("psp", {"sample": 2, "form": "distributed", "resample": "fixed", "poll_s": 0.002}),
    ("sync_switch", {"phases": "bsp@0.3,ssp(staleness=2)@0.6,asp"}),
    ("sync_switch", {"phases": "hybrid_sgd(h=5,wait=never)@0.7,bsp"}),
    ("sync_switch", {"phases": "bsp@0.7,asp", "online": "greedy", "window": 1, "consecutive": 1}),
    ("hybrid_sgd", {"h": 12}),
    ("hybrid_sgd", {"threshold": "constant", "first": 3, "wait": "never"}),
    ("hybrid_sgd", {"threshold": "constant", "first": 3, "wait": "never", "reduce": "sum"}),
    ("bounded_ps", {"staleness": 1, "resync": 3}),
    ("bounded_ps", {"staleness": 3, "buffered": True, "resync": 3}),
    ("backup_bsp", {"backups": 1, "late": "apply"}),
]
"""Protocols that take every gradient, some of them several in one step."""


def sum_of_pushed(run: Run) -> Tensor:
    """What the trace says has gone into the weights: the gradient of a sample is the sample."""
    x, _ = CASES["exact"].samples(SAMPLES)
    return sum((x[first : first + size].sum(0) for p in run.pushes for _, first, size in p.work), x[0] * 0)


def with_deaths(lab: Lab, number: int, random: Random, **dials: Any) -> Run:
    """A run of which so many workers are killed, each at an instant of its own."""
    victims = random.sample(range(WORKERS), number)
    pause = lab.pause(random.randint(1, 5), *victims)
    running = lab.start("train.py", "exact", *SIZES, *pause, **dials)
    lab.until_paused(1)  # the others may wait for a round that this one is missing in
    lab.go_on()
    for rank in victims:
        time.sleep(random.uniform(0, 0.02))
        running.kill(rank)
    run = lab.finish(running)
    assert run.died == set(victims)
    return run


def test_bsp_with_the_same_seed_repeats_bit_for_bit_however_slow_who_is(lab: Lab) -> None:
    """Dropout, BatchNorm and a shuffled loader included."""
    args = ("train.py", "noisy", *SIZES, "--shuffle")
    one = lab.trained(*args, workers=3, protocol="bsp", seed=7, device_time_s=0.002, slow={0: 3.0})
    other = lab.trained(*args, workers=3, protocol="bsp", seed=7, device_time_s=0.001, slow={2: 6.0})
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def test_another_seed_gives_another_order(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES, "--shuffle")
    one, other = (lab.trained(*args, workers=2, protocol="bsp", seed=seed) for seed in (1, 2))
    assert not torch.equal(one.weights["0.weight"], other.weights["0.weight"])


@pytest.mark.parametrize(
    ("protocol", "settings", "bound"),
    [
        ("bsp", {}, 0),
        ("ssp", {"staleness": 0}, 0),
        ("ssp", {"staleness": 2}, 2),
        ("dssp", {"lower": 1, "upper": 3}, 3),
        ("dssp", {"lower": 1, "upper": 3, "preset": "bounded_eager"}, 3),
    ],
)
def test_nobody_starts_further_ahead_of_the_slowest_than_the_bound(
    lab: Lab, protocol: str, settings: dict[str, int], bound: int
) -> None:
    """The last worker is slower, and waits until the others have run into the bound; their clocks are counted
    here."""
    args = ("momentum", *SIZES, *lab.pause(4, only=3))
    running = lab.start("train.py", *args, protocol=protocol, settings=settings, **SLOWED)
    lab.until_paused(1)
    running.until_pushes(3 + 3 * (4 + bound if protocol == "ssp" else 4))
    lab.go_on()
    run = lab.finish(running)
    assert run.result.status == "finished", run.end.detail
    gaps = gaps_at_release(run)
    assert max(gaps) <= bound
    assert run.result.max_clock_gap <= bound
    if protocol == "ssp":
        assert max(gaps) == bound, "nobody came as far as it may"


def gaps_at_release(run: Run) -> list[int]:
    """How far ahead of the slowest each released worker was, as long as all four took part."""
    clock = Counter(dict.fromkeys(range(WORKERS), 0))
    gaps = []
    for event in run.trace:
        kind = type(event).__name__
        if kind == "WorkerLeft":
            break
        if kind == "Decided":
            clock.update([event.pushed])
            gaps += [clock[worker] - min(clock.values()) for worker in event.release]
    return gaps


@pytest.mark.parametrize("rounds", [1, 2, 3, 18])
def test_ssp_without_staleness_makes_the_steps_of_bsp_in_parts(lab: Lab, rounds: int) -> None:
    """Plain SGD, each push a fourth of a step: after each round the weights are those of BSP."""
    sizes = ("--samples", rounds * WORKERS * BATCH, "--batch", BATCH, "--epochs", 1)
    runs = [
        lab.trained("train.py", "sgd", *sizes, workers=WORKERS, protocol=name, settings=settings)
        for name, settings in (("bsp", {}), ("ssp", {"staleness": 0}))
    ]
    assert runs[0].result.updates == rounds
    assert runs[1].result.updates == rounds * WORKERS
    for name, tensor in runs[0].weights.items():
        torch.testing.assert_close(runs[1].weights[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("protocol", ASYNCHRONOUS)
def test_no_update_is_lost_or_applied_twice(lab: Lab, protocol: str) -> None:
    """Whole numbers add up exactly in any order: the weights are the start minus every gradient."""
    run = lab.trained("train.py", "exact", *SIZES, protocol=protocol, weighting="sum", **SLOWED)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))
    assert torch.equal(sum_of_pushed(run), EPOCHS * x.sum(0))


@pytest.mark.parametrize(("protocol", "settings"), LOSING_NOTHING)
def test_a_held_gradient_counts_exactly_once_also_if_its_worker_runs_on(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    """A worker that runs on overwrites the memory its held gradient lay in. Thirds are not exact."""
    dials = SLOWED | {"protocol": protocol, "settings": settings, "weighting": "sum"}
    run = lab.trained("train.py", "exact", *SIZES, **dials)
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))


@pytest.mark.parametrize(("protocol", "settings"), LOSING_NOTHING)
def test_a_held_gradient_counts_exactly_once_also_if_its_worker_is_killed(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    random = Random(f"{protocol}/{settings}")
    dials = SLOWED | {"protocol": protocol, "settings": settings, "weighting": "sum"}
    run = with_deaths(lab, 2, random, **dials)
    model, _ = CASES["exact"].build()
    torch.testing.assert_close(run.weights["w"], model.state_dict()["w"] - sum_of_pushed(run))
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("workers", [2, 4])
def test_in_lockstep_a_sum_loses_nothing_either(lab: Lab, workers: int) -> None:
    """Halves and quarters are exact too."""
    run = lab.trained("train.py", "exact", *SIZES, workers=workers, protocol="bsp", weighting="sum")
    model, _ = CASES["exact"].build()
    x, _ = CASES["exact"].samples(SAMPLES)
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - EPOCHS * x.sum(0))


@pytest.mark.parametrize(
    ("protocol", "settings"),
    [
        ("elastic_bsp", {"lookahead": 1, "monitor": "off"}),
        ("hybrid_sgd", {"threshold": "constant", "first": WORKERS}),
        ("bounded_ps", {"staleness": 0, "buffered": True, "resync": 0}),
        ("backup_bsp", {"backups": 0}),
        ("sync_switch", {"phases": "bsp"}),
        ("sync_switch", {"phases": "bsp@1,asp"}),
    ],
)
def test_at_its_limit_a_protocol_is_bsp_bit_for_bit(
    lab: Lab, protocol: str, settings: dict[str, Any]
) -> None:
    dials = {"workers": WORKERS, "device_time_s": 0.002, "slow": {3: 2.0}}
    args = ("train.py", "momentum", *SIZES, "--shuffle")
    limit = lab.trained(*args, protocol=protocol, settings=settings, **dials)
    bsp = lab.trained(*args, protocol="bsp", **dials)
    assert limit.result.updates == bsp.result.updates
    assert all(torch.equal(limit.weights[name], bsp.weights[name]) for name in bsp.weights)


def test_a_phase_after_lockstep_may_have_less_momentum(lab: Lab) -> None:
    moved = {}
    for policy in ("keep", "zero"):
        settings = {"phases": "bsp@0.5,asp", "momentum": policy}
        run = lab.trained(
            "train.py", "momentum", *SIZES, workers=2, protocol="sync_switch", settings=settings
        )
        assert any("phase 2 of 2 (asp) begins" in note.text for note in run.of(Note))
        moved[policy] = run.weights
    assert any(not torch.equal(moved["keep"][name], moved["zero"][name]) for name in moved["keep"])


def test_a_copy_of_the_weights_for_each_worker_changes_nothing_in_lockstep(lab: Lab) -> None:
    args = ("train.py", "momentum", *SIZES)
    one, other = (
        lab.trained(*args, workers=2, protocol="bsp", private_weights=private) for private in (False, True)
    )
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("protocol", ASYNCHRONOUS)
def test_no_update_is_lost_or_applied_twice_when_workers_are_killed(
    lab: Lab, protocol: str, seed: int
) -> None:
    random = Random(f"{protocol}/{seed}")
    run = with_deaths(lab, 3, random, protocol=protocol, weighting="sum", **SLOWED)
    model, _ = CASES["exact"].build()
    assert torch.equal(run.weights["w"], model.state_dict()["w"] - sum_of_pushed(run))
    assert run.used() == once(EPOCHS, SAMPLES)


@pytest.mark.parametrize("protocol", ["asp", "dssp"])
def test_a_worker_slower_than_whole_epochs_of_the_others_adds_none(lab: Lab, protocol: str) -> None:
    """Its passes over the loader find their epochs finished; it must not begin others at the end."""
    sizes = ("--samples", 24, "--batch", 4, "--epochs", 6)
    dials = {"workers": 3, "device_time_s": 0.002, "slow": {2: 40.0}, "settings": {}}
    if protocol == "dssp":
        dials["settings"] = {"lower": 30, "upper": 60}
    run = lab.trained("train.py", "momentum", *sizes, protocol=protocol, **dials)
    assert run.used() == once(6, 24)
