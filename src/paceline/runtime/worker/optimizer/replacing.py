"""An optimizer's `step` replaced by another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Put another `step` into an optimizer so that LR schedulers, made before or after, accept it."""

    def stepped(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    stepped._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = stepped  # type: ignore[method-assign]
