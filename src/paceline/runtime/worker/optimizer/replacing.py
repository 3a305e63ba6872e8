"""An optimizer's `step` replaced by another one, and which optimizer that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that steps, where accelerate's wrapper only says when: its hooks and state are those."""
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    within = getattr(optimizer, "optimizer", None)
    if "AcceleratedOptimizer" in kinds and isinstance(within, torch.optim.Optimizer):
        return innermost(within)
    return optimizer


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any], hooked: bool = False) -> None:
    """Put another `step` into an optimizer so that LR schedulers, made before or after, accept it.

    `hooked`: whether it calls the hooks on the optimizer's steps, and torch's for all optimizers, as torch
    does around a step; where a step of torch's own is within, that calls them.
    """

    def plain(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    within = torch.optim.Optimizer.profile_hook_step(plain) if hooked else plain

    def stepped(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return within(optimizer, *args, **kwargs)

    stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = stepped  # type: ignore[method-assign]
