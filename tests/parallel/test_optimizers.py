"""Which optimizers may step tensors that lie in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.optimizers import check_elementwise
from paceline.store.pieces import ELEMENTWISE


class WithOtherDefaults(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)


class ByNorms(torch.optim.SGD):
    """As LARS does, in short."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * p.norm() / p.grad.norm())


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_torchs_that_step_every_number_by_itself_are_taken(name: str) -> None:
    optimizer = getattr(torch.optim, name)(nn.Linear(2, 2).parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    check_elementwise(optimizer)


def test_one_of_them_under_another_name_is_taken_too() -> None:
    check_elementwise(WithOtherDefaults(nn.Linear(2, 2).parameters()))


@pytest.mark.parametrize("kind", [ByNorms, torch.optim.Adafactor])
def test_what_may_look_at_whole_tensors_is_refused(kind: Any) -> None:
    optimizer = kind(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"optimizer {kind.__name__} .* uses whole tensors"):
        check_elementwise(optimizer)
