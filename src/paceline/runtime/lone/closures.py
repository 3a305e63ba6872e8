"""A lone worker's plain steps, with a look at their gradients: also where a closure computes them within."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.errors import ConfigError


class _Unusable(Exception):
    """The gradients that a closure has computed are not to be stepped with."""


def checked_step(
    optimizer: torch.optim.Optimizer, plain: Callable[..., Any], check: Callable[[], bool], clips: bool
) -> Callable[..., tuple[bool, Any]]:
    """The step, which tells whether its gradients could be used, and what torch's returns.

    `check` looks at gradients, and clips them if the run `clips`. torch's optimizers evaluate a closure first
    of all, and once: so it is looked at what that gives, and nothing has moved yet if it is of no use.
    """

    def step(*args: Any, **kwargs: Any) -> tuple[bool, Any]:
        closure = args[0] if args else kwargs.get("closure")
        if closure is not None and _evaluates_once(optimizer):
            return _with_closure(plain, closure, check)
        if closure is not None and clips:
            raise ConfigError(
                f"--clip-norm clips once per step, but {type(optimizer).__name__} may evaluate its closure "
                "several times in one. Clip within the closure: pace.clip_grad_norm_(max_norm)."
            )
        return (True, plain(*args, **kwargs)) if check() else (False, None)

    return step


def _with_closure(
    plain: Callable[..., Any], closure: Callable[[], Any], check: Callable[[], bool]
) -> tuple[bool, Any]:
    def evaluated() -> Any:
        loss = closure()
        if not check():
            raise _Unusable
        return loss

    try:
        return True, plain(evaluated)
    except _Unusable:
        return False, None


def _evaluates_once(optimizer: torch.optim.Optimizer) -> bool:
    name = type(optimizer).__name__
    return name != "LBFGS" and getattr(torch.optim, name, None) is type(optimizer)
