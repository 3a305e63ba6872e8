"""Several models and optimizers: each step an exchange of its own, as one process with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from support.runs import Lab, once
from support.tensors import assert_close, assert_equal, assert_finite

SCRIPT = Path(__file__).parent / "gan.py"
WAYS = ["", "--joint"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Plain PyTorch, with the batch that two workers have together."""
    folder, found = tmp_path_factory.mktemp("plain"), {}
    for way in WAYS:
        file = folder / f"model{way}"
        flags = [way] if way else []
        subprocess.run(
            [sys.executable, SCRIPT, "--batch", "8", "--save", file, *flags], check=True, timeout=60
        )
        found[way] = load_file(file.with_suffix(".0"))
    return found


@pytest.mark.parametrize(
    ("protocol", "fabric", "way"),
    [
        ("bsp", "shared", ""),
        ("bsp", "shared", "--joint"),
        ("allreduce", "shared", "--joint"),
        ("allreduce", "gloo", ""),
    ],
)
def test_a_gan_in_lockstep_equals_one_process_with_the_whole_batch(
    lab: Lab, reference: dict[str, dict[str, Tensor]], tmp_path: Path, protocol: str, fabric: str, way: str
) -> None:
    flags = [way] if way else []
    run = lab.trained(SCRIPT, "--save", tmp_path / "m", *flags, workers=2, protocol=protocol, fabric=fabric)
    assert_close(run.weights, reference[way], 1e-9)
    assert run.result.samples == 2 * 48
    assert run.used() == once(2, 48)
    for rank in range(2):
        assert_equal(load_file(tmp_path / f"m.{rank}"), run.weights)


@pytest.mark.parametrize("protocol", ["asp", "ssp", "dssp", "local_sgd"])
def test_a_gan_trains_under_protocols_without_rounds(lab: Lab, protocol: str) -> None:
    run = lab.trained(SCRIPT, "--epochs", 6, workers=2, protocol=protocol)
    assert run.result.samples == 6 * 48
    assert_finite(run.weights)
    torch.manual_seed(4)
    assert not torch.equal(run.weights["0.0.weight"], torch.nn.Linear(3, 8).double().weight)


def test_one_worker_with_several_optimizers_equals_plain_pytorch(
    lab: Lab, reference: dict[str, dict[str, Tensor]]
) -> None:
    run = lab.trained(SCRIPT, "--batch", 8, workers=1)
    assert_close(run.weights, reference[""], 1e-12)


UNEQUAL = """
import torch, paceline
from torch import nn
pace = paceline.join()
a, b = nn.Linear(2, 1), nn.Linear(2, 1)
first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b))
pace.prepare(a, b, first, second)
(a(torch.ones(4, 2)) + b(torch.ones(4, 2))).mean().backward()
(first if pace.rank else second).step()
"""


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
def test_workers_that_step_different_optimizers_in_one_round_are_told(lab: Lab, protocol: str) -> None:
    run = lab.run(lab.script(UNEQUAL), workers=2, protocol=protocol)
    assert "rank 0 steps optimizer 1, rank 1 steps optimizer 0" in run.end.detail
