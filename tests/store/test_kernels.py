"""A step by the short way has the bits of torch's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from paceline.store.kernels import step_of

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"betas": (0.5, 0.9), "maximize": True}),
    (torch.optim.RMSprop, {}),
]

KNOWN = [
    (cls, settings) for cls, settings in CASES if settings.keys() <= inspect.signature(cls).parameters.keys()
]
"""Without settings that came with a later torch."""


def _trained(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any], short: bool
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Weights and state after a few steps, of which some have another learning rate or momentum."""
    draw = torch.Generator().manual_seed(3)
    weights = torch.randn(1003, generator=draw)
    fused = {} if cls is torch.optim.RMSprop else {"fused": True}
    optimizer = cls([weights], lr=0.01, **settings, **fused)  # type: ignore[call-arg]
    step = step_of(optimizer) if short else inspect.unwrap(cls.step)
    for number in range(6):
        weights.grad = torch.randn(1003, generator=draw)
        group = optimizer.param_groups[0]
        group["lr"] = 0.01 * (number + 1)
        if "momentum" in settings:
            group["momentum"] = 0.0 if number == 2 and not settings.get("nesterov") else 0.8
        step(optimizer)
    return weights, dict(optimizer.state[weights])


@pytest.mark.parametrize(("cls", "settings"), KNOWN)
def test_weights_and_state_have_the_bits_of_torchs_own_step(
    cls: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    (mine, kept), (theirs, state) = (_trained(cls, settings, short) for short in (True, False))
    assert torch.equal(mine, theirs)
    assert kept.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(kept[name], value) if isinstance(value, torch.Tensor) else kept[name] == value


def test_what_is_not_foreseen_takes_torchs_own_step() -> None:
    weights = torch.zeros(8, dtype=torch.bfloat16)
    for optimizer in (
        torch.optim.SGD([weights], lr=0.1),
        torch.optim.Adam([torch.zeros(8)], amsgrad=True, fused=True),
        torch.optim.NAdam([torch.zeros(8)]),
    ):
        assert step_of(optimizer) is inspect.unwrap(type(optimizer).step)
