"""Weights that a script clamps after every step (WGAN): as projected SGD under every protocol, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from support.runs import Lab, Run
from support.tensors import assert_close, assert_equal

SCRIPT = Path(__file__).parent / "wgan.py"
LARGEST = 0.01
INCREMENTS = {"protocol": "asp", "apply": "increments"}
WAYS: list[dict[str, Any]] = [
    {"protocol": "local_sgd"},
    {"protocol": "allreduce"},
    {"protocol": "allreduce", "fabric": "gloo"},
    {"protocol": "diloco", "settings": {"period": 3}},
    {"protocol": "bsp"},
    {"protocol": "bsp", "private_weights": True},
    {"protocol": "asp"},
    {"protocol": "ssp"},
    {"protocol": "psp", "settings": {"form": "distributed"}},
    INCREMENTS,
]


def largest(run: Run) -> float:
    """Of the critic's weights."""
    return max(float(w.abs().max()) for name, w in run.weights.items() if name.startswith("0."))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """One process with the batch that two workers have together."""
    file = tmp_path_factory.mktemp("plain") / "model"
    subprocess.run([sys.executable, SCRIPT, "--batch", "8", "--save", file], check=True, timeout=60)
    return load_file(f"{file}.0")


def test_alone_the_critic_stays_within_its_bounds(alone: dict[str, Tensor]) -> None:
    """And reaches them, else the other tests here would prove nothing."""
    assert max(float(w.abs().max()) for name, w in alone.items() if name.startswith("0.")) == LARGEST


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_critic_stays_within_its_bounds(lab: Lab, way: dict[str, Any]) -> None:
    run = lab.trained(SCRIPT, workers=2, **way)
    assert 0.9 * LARGEST < largest(run) <= LARGEST * (1 + 1e-12)
