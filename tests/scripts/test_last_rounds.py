"""Accumulated gradients where the last round of an epoch has nothing for one of the workers.

What that worker computes on meanwhile, so that all take part, is not to be in its sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.runs import Lab
from support.tensors import assert_close

SCRIPT = Path(__file__).parent / "last_rounds.py"
Round = tuple[tuple[int, ...], tuple[int, ...]]
WITHIN: list[Round] = [((0, 2), (1, 3)), ((4, 6), (5,))]
"""Seven samples, by step and worker."""
ACROSS: list[Round] = [((0, 2), (1, 3)), ((4, 0), (1,)), ((2, 4), (3,))]
"""Five, twice; a sum goes on in the next epoch."""


def one_process(samples: int, steps: list[Round]) -> Tensor:
    """Each worker's sum counts by its samples, and nobody else's are in it."""
    w = torch.zeros(samples, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    for step in steps:
        optimizer.zero_grad()
        total = sum(map(len, step))
        for mine in step:
            (torch.eye(samples, dtype=torch.float64)[list(mine)] @ w).sum().mul(len(mine) / total).backward()
        optimizer.step()
    return w.detach()


@pytest.mark.parametrize("how", [[], ["--stream"]])
@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
@pytest.mark.parametrize(("samples", "epochs", "steps"), [(7, 1, WITHIN), (5, 2, ACROSS)])
def test_the_last_samples_count_as_in_one_process(
    lab: Lab, samples: int, epochs: int, steps: list[Round], protocol: str, how: list[str]
) -> None:
    dials: dict[str, Any] = {"workers": 2, "protocol": protocol, "shards": "equal"}
    run = lab.trained(SCRIPT, "--samples", samples, "--epochs", epochs, *how, **dials)
    assert_close(run.weights, {"w": one_process(samples, steps)}, 1e-12)
