"""Steps that a peer's optimizer is not to remember."""

from __future__ import annotations

from typing import Any

import torch

from paceline.protocols.core.operations import Preview
from paceline.runtime.peer.steps import stepping


class Counting(torch.optim.Optimizer):
    """Keeps one number of steps in its group, and one in its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "k": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                self.state[p]["k"] = self.state[p].get("k", 0) + 1


def test_a_preview_is_not_counted_by_an_optimizer_in_whatever_place() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer: Any = Counting([weight])
    optimizer.step()
    with stepping(optimizer, Preview(None)):  # type: ignore[arg-type]
        optimizer.step()
    assert optimizer.param_groups[0]["k"] == 1
    assert optimizer.state[weight]["k"] == 1
