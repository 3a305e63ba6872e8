"""A graph that a script keeps over a step: torch refuses to go back through it, here as alone."""

from __future__ import annotations

from typing import Any

import pytest

from support.runs import Lab

SCRIPT = """
import torch, paceline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
pace = paceline.join()
model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=2)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for (x,) in loader:
    kept = model(x).square().mean()
    (model(x) - 1).square().mean().backward()
    optimizer.step()
    kept.backward()
"""
EVALUATES = SCRIPT.replace("    optimizer.step()\n", "    pace.evaluate(lambda m: 1.0)\n")
EVALUATES += "    optimizer.step()\n"


@pytest.mark.parametrize(
    "dials",
    [
        {"workers": 1},
        {"protocol": "bsp"},
        {"protocol": "bsp", "private_weights": True},
        {"protocol": "asp"},
        {"protocol": "asp", "apply": "increments"},
        {"protocol": "allreduce"},
        {"protocol": "allreduce", "private_weights": True},
        {"protocol": "local_sgd"},
    ],
    ids=lambda dials: " ".join(map(str, dials.values())),
)
def test_a_gradient_of_weights_that_are_gone_is_refused(lab: Lab, dials: dict[str, Any]) -> None:
    run = lab.run(lab.script(SCRIPT), **{"workers": 2} | dials)
    assert run.result.status == "failed"
    assert "modified by an inplace operation" in run.logs()


@pytest.mark.parametrize("protocol", ["bsp", "allreduce"])
@pytest.mark.parametrize("private", [False, True])
def test_an_evaluation_in_lockstep_changes_no_weights(lab: Lab, protocol: str, private: bool) -> None:
    lab.trained(lab.script(EVALUATES), workers=2, protocol=protocol, private_weights=private)


def test_one_that_brings_fresh_weights_is_no_place_to_keep_a_graph_over(lab: Lab) -> None:
    run = lab.run(lab.script(EVALUATES), workers=2, protocol="asp")
    assert "modified by an inplace operation" in run.logs()
