"""Steps of fused optimizers without the way there.

A fused step of torch's SGD, Adam or AdamW sorts its tensors by device and type, opens contexts and reads
its settings, and then makes one call. Of a piece of memory all of that is known beforehand. What is called
here is what torch would call, with the same arguments: the same bits, in a fraction of the Python. No
piece of memory requires a gradient, so none has to be switched off. Where torch has no such call, or an
optimizer something that is not foreseen here, its own step is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[torch.optim.Optimizer], Any]
UNFORESEEN = ("amsgrad", "capturable", "differentiable", "foreach")


def step_of(optimizer: torch.optim.Optimizer) -> Step:
    """The shortest way to step an optimizer over one tensor."""
    plain: Step = inspect.unwrap(type(optimizer).step)  # hooks and profiling cost more than small steps
    group = optimizer.param_groups[0]
    weights = group["params"][0]
    suits = weights.dtype in (torch.float32, torch.float64) and weights.device.type == "cpu"
    if not (suits and group.get("fused")) or any(group.get(name) for name in UNFORESEEN):
        return plain
    if type(optimizer) is torch.optim.SGD and hasattr(torch, "_fused_sgd_"):
        return _Sgd(weights, plain)
    kernel = {torch.optim.Adam: "_fused_adam_", torch.optim.AdamW: "_fused_adamw_"}.get(type(optimizer), "")
    return _Adam(weights, plain, getattr(torch, kernel)) if hasattr(torch, kernel) else plain


class _Sgd:
    """One tensor's fused SGD."""

    def __init__(self, weights: Tensor, plain: Step) -> None:
        self._weights, self._plain = [weights], plain

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """A step; the first one with a momentum is torch's own, which makes the memory for it."""
        weights, group = self._weights[0], optimizer.param_groups[0]
        kept: list[Tensor] = []
        if group["momentum"] != 0:
            buffer = optimizer.state.get(weights, {}).get("momentum_buffer")
            if buffer is None:
                self._plain(optimizer)
                return
            kept = [buffer]
        torch._fused_sgd_(
            self._weights,
            [weights.grad],  # type: ignore[list-item]
            kept,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            grad_scale=None,
            found_inf=None,
        )


class _Adam:
    """One tensor's fused Adam or AdamW."""

    def __init__(self, weights: Tensor, plain: Step, kernel: Callable[..., Any]) -> None:
        self._weights, self._plain, self._kernel = [weights], plain, kernel

    def __call__(self, optimizer: torch.optim.Optimizer) -> None:
        """A step; the first one is torch's own, which makes the memory for it."""
        weights, group = self._weights[0], optimizer.param_groups[0]
        state = optimizer.state.get(weights, {})
        decoupled = group.get("decoupled_weight_decay", self._kernel is torch._fused_adamw_)
        if not state or group["amsgrad"] or decoupled is not (self._kernel is torch._fused_adamw_):
            self._plain(optimizer)
            return
        beta1, beta2 = group["betas"]
        state["step"].add_(1)
        self._kernel(
            self._weights,
            [weights.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=None,
            found_inf=None,
        )
