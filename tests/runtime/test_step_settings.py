"""What an optimizer's step changes in its groups is kept, and what cannot be kept is named."""

from __future__ import annotations

from typing import Any

import torch

from paceline.runtime.checkpoints.step_settings import StepSettings


class Busy(torch.optim.Optimizer):
    """Changes a number, a tensor and a list in its group."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        held = {"k": 0, "d": torch.zeros(()), "sums": torch.zeros(3), "betas": (0.9, 0.99)}
        super().__init__([weight], {"lr": 0.1, "decay": 0.5} | held)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["d"] += 0.5
            group["sums"] += 1.0
            group["betas"] = (0.8, 0.99)


def test_it_comes_back_in_the_form_it_had_and_nothing_else_does() -> None:
    said: list[str] = []
    settings, optimizer = StepSettings(said.append), Busy()
    with settings.watched(optimizer):
        optimizer.step()
    kept = settings.of(optimizer)
    assert kept == {"group0.k": 1, "group0.d": 0.5, "group0.betas": [0.8, 0.99]}
    assert "'sums'" in said[0]
    other, again = StepSettings(said.append), Busy()
    again.param_groups[0]["decay"] = 0.1  # as the resumed script has it
    assert other.give(again, kept | {"0.step": 7}) == {"0.step": 7}
    group = again.param_groups[0]
    assert (group["k"], float(group["d"]), group["betas"], group["decay"]) == (1, 0.5, (0.8, 0.99), 0.1)
    assert other.of(again) == kept


def test_torch_s_own_optimizers_are_not_looked_at() -> None:
    settings = StepSettings(lambda text: None)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with settings.watched(optimizer):
        optimizer.param_groups[0]["weight_decay"] = 0.5
    assert settings.of(optimizer) == {}
