"""An optimizer's `step` replaced by another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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
