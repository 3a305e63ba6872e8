"""What a peer does with an optimizer that stays its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from paceline.errors import BadGradient
from paceline.runtime.worker.optimizer.unprepared import Unprepared
from paceline.store.together import Together, parts_of

LEAVE_GRADIENTS_ALONE = ("SGD", "Adam", "AdamW")
"""Optimizers of torch whose plain and fused forms only read gradients: these may lie where all read them."""


def reads_only(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether it leaves gradients as they are, and so do hooks on its steps."""
    if isinstance(optimizer, Together):
        return all(reads_only(part) for part in optimizer.optimizers)
    name = type(optimizer).__name__
    if optimizer is None or has_hooks(optimizer) or type(optimizer) is not getattr(torch.optim, name, None):
        return False
    return name in LEAVE_GRADIENTS_ALONE and not any(g.get("foreach") for g in optimizer.param_groups)


def hasten(optimizer: torch.optim.Optimizer) -> None:
    """Use torch's fused kernels unless the user chose otherwise: on CPU they are several times faster.

    As in the store, they may differ from the plain ones in the last bit, and are not for 16-bit weights.
    What a script saves has its own choice, and what it loads is hastened again.
    """
    chosen_here = _hasten(optimizer)

    def as_chosen(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for number in chosen_here:
            state["param_groups"][number]["fused"] = None

    optimizer.register_state_dict_post_hook(as_chosen)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: chosen_here.update(_hasten(optimizer)))


def _hasten(optimizer: torch.optim.Optimizer) -> set[int]:
    """Which groups are stepped by fused kernels from now on."""
    found = set()
    for number, group in enumerate(optimizer.param_groups):
        free = "fused" in group and group["fused"] is None
        chosen = group.get("foreach") or group.get("differentiable") or group.get("capturable")
        wide = all(p.dtype in (torch.float32, torch.float64) for p in group["params"])
        if type(optimizer).__module__.startswith("torch.optim") and free and not chosen and wide:
            group["fused"] = True
            found.add(number)
    return found


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody wants to be told of its steps, or of everybody's."""
    parts = parts_of(optimizer)
    ours = all(isinstance(hook, Unprepared) for hook in _global_optimizer_pre_hooks.values())
    return (
        not ours
        or bool(_global_optimizer_post_hooks)
        or any(bool(p._optimizer_step_pre_hooks or p._optimizer_step_post_hooks) for p in parts)
    )


def not_finite(rank: int, parameter: str | None) -> BadGradient:
    """What to raise when a gradient, or the mean of all, cannot be applied."""
    where = "the mean of all gradients" if parameter is None else f"the gradient of {parameter!r}"
    return BadGradient(
        f"rank {rank} has NaN or infinity in {where}; nothing was applied. "
        "Lower the learning rate, clip (--clip-norm), or use --bad-gradient skip."
    )
