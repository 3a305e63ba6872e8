"""Models, steps and optimizers of all kinds: lockstep equals the large batch, one worker plain PyTorch."""

from __future__ import annotations

import os

import pytest
import torch

from e2e.scripts.cases import CASES, LARGE_BATCH, ROUGH, TIGHT, Heads, in_rounds, large_batch
from support.runs import Lab, Run
from support.tensors import assert_close, assert_equal, threads

SAMPLES, BATCH, EPOCHS, WORKERS = 48, 4, 2, 2
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)


def assert_loads(run: Run, name: str) -> None:
    """The saved weights are all that a fresh model needs."""
    torch.manual_seed(0)
    case = CASES["momentum" if name == "compiled" else name]
    fresh = case.model().to(case.dtype)
    fresh.load_state_dict(run.weights, strict=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("name", LARGE_BATCH)
def test_lockstep_equals_one_process_with_the_large_batch(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=WORKERS, protocol="bsp")
    rounds = in_rounds(SAMPLES, BATCH, WORKERS, EPOCHS)
    reference = large_batch(CASES[name], SAMPLES, rounds)
    assert_close(run.weights, reference, 1e-5 if name == "two_types" else 1e-10)
    assert_loads(run, name)


@pytest.mark.parametrize("name", ROUGH)
def test_lockstep_in_sixteen_bits_comes_near_to_the_large_batch(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=WORKERS, protocol="bsp")
    reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, WORKERS, EPOCHS))
    assert_close(run.weights, reference, 0.05)
    assert_loads(run, name)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("name", sorted({*LARGE_BATCH, *ROUGH} - {"compiled", "wide", "wide_adamw"}))
def test_one_worker_equals_plain_pytorch_whatever_the_model(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=1)
    with threads(os.cpu_count() or 1):
        reference = large_batch(CASES[name], SAMPLES, in_rounds(SAMPLES, BATCH, 1, EPOCHS))
    assert_equal(run.weights, reference)
    assert_loads(run, name)


@pytest.mark.parametrize("protocol", ["bsp", "asp"])
@pytest.mark.parametrize("name", ["zero_first", "model_zero", "clipped"])
def test_a_parameter_without_gradient_is_not_decayed(lab: Lab, name: str, protocol: str) -> None:
    run = lab.trained("train.py", name, *SIZES, workers=3, protocol=protocol)
    assert torch.equal(run.weights["never"], Heads().never.detach().double())


def test_the_buffers_that_are_saved_are_those_of_the_lead(lab: Lab) -> None:
    """BatchNorm's statistics are every worker's own; each of them saw half of the batches."""
    run = lab.trained("train.py", "noisy", *SIZES, workers=WORKERS, protocol="bsp")
    lead = [push for push in run.pushes if push.pushed == 0]
    assert int(run.weights["1.num_batches_tracked"]) == len(lead) == SAMPLES // BATCH * EPOCHS // WORKERS


def test_the_buffers_of_a_dead_lead_are_not_saved_if_others_lived_longer(lab: Lab) -> None:
    sizes = ("--samples", 400, "--batch", 4, "--epochs", 2)
    running = lab.start("train.py", "noisy", *sizes, *lab.pause(2), workers=3, protocol="asp")
    lab.until_paused(3)
    running.kill(0)
    lab.go_on()
    run = lab.finish(running)
    assert run.died == {0}
    assert int(run.weights["1.num_batches_tracked"]) > 20


def test_clipping_in_the_store_equals_clipping_the_large_batch(lab: Lab) -> None:
    """Clipping per worker would not: the norm of a mean is less than the mean of norms."""
    clip = 0.05
    run = lab.trained("train.py", "momentum", *SIZES, workers=WORKERS, protocol="bsp", clip_norm=clip)
    assert_close(run.weights, clipped_large_batch(clip), 1e-10)


def test_clipping_for_one_worker_equals_clipping_in_plain_pytorch(lab: Lab) -> None:
    run = lab.trained("train.py", "momentum", *SIZES, workers=1, clip_norm=0.05)
    assert_close(run.weights, clipped_large_batch(0.05, workers=1), 1e-10)


def test_clipping_in_the_script_is_every_workers_own_before_the_mean(lab: Lab) -> None:
    run = lab.trained("train.py", "tightly_clipped", *SIZES, workers=WORKERS, protocol="bsp")
    assert_close(run.weights, mean_of_clipped(), 1e-10)


def mean_of_clipped() -> dict[str, torch.Tensor]:
    """Each batch's gradient clipped by itself, then one step with their mean."""
    case = CASES["momentum"]
    model, optimizer = case.build()
    x, y = case.samples(SAMPLES)
    parameters = list(model.parameters())
    for indices in in_rounds(SAMPLES, BATCH, WORKERS, EPOCHS):
        total = [torch.zeros_like(p) for p in parameters]
        for batch in torch.tensor(indices).split(BATCH):
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            assert torch.nn.utils.clip_grad_norm_(parameters, TIGHT) > TIGHT
            total = [t + p.grad / WORKERS for t, p in zip(total, parameters, strict=True)]
            optimizer.zero_grad()
        for p, gradient in zip(parameters, total, strict=True):
            p.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def clipped_large_batch(clip: float, workers: int = WORKERS) -> dict[str, torch.Tensor]:
    case = CASES["momentum"]
    model, optimizer = case.build()
    x, y = case.samples(SAMPLES)
    norms = []
    for indices in in_rounds(SAMPLES, BATCH, workers, EPOCHS):
        torch.nn.functional.cross_entropy(model(x[indices]), y[indices]).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > clip, "the clip never bit"
    return model.state_dict()
