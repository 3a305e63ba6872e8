"""Against the reference: plain PyTorch in one process."""

from __future__ import annotations

import os

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from e2e.scripts.cases import CASES, Case, in_rounds, large_batch
from support.runs import Lab, once
from support.tensors import assert_close, assert_equal, threads

SAMPLES, BATCH, EPOCHS = 50, 4, 3
SIZES = ("--samples", SAMPLES, "--batch", BATCH, "--epochs", EPOCHS)


def plain_pytorch(case: Case) -> dict[str, Tensor]:
    """The loop of the script without Paceline: shuffled by the global generator."""
    model, optimizer = case.build()
    data = TensorDataset(*case.samples(SAMPLES))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for _ in range(EPOCHS):
        for x, y in loader:
            case.iteration(model, optimizer, x, y)
    return model.state_dict()


@pytest.mark.parametrize("name", ["single", "momentum", "adamw", "noisy", "noisy_adamw"])
def test_one_worker_equals_plain_pytorch_bit_for_bit(lab: Lab, name: str) -> None:
    run = lab.trained("train.py", name, *SIZES, "--shuffle", workers=1)
    with threads(os.cpu_count() or 1):
        assert_equal(run.weights, plain_pytorch(CASES[name]))
    assert run.result.samples == EPOCHS * SAMPLES


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_bsp_equals_one_process_with_the_batches_of_a_round_as_one(lab: Lab, name: str, workers: int) -> None:
    """Fifty samples in fours: the last round of an epoch is short, and some have nothing to do in it."""
    run = lab.trained("train.py", name, *SIZES, workers=workers, protocol="bsp")
    rounds = in_rounds(SAMPLES, BATCH, workers, EPOCHS)
    assert_close(run.weights, large_batch(CASES[name], SAMPLES, rounds), 1e-11)
    assert run.used() == once(EPOCHS, SAMPLES)
    assert run.result.updates == len(rounds)
