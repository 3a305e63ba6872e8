"""Steps under a GradScaler: gradients of a scaled loss, and what becomes of those that overflow.

torch hands an optimizer that says it can deal with them two tensors, `grad_scale` and `found_inf`. Ours do:
gradients are unscaled before anybody else sees them, and infinity is left in them, so that it reaches all
whose step it would be part of, as it does where gradients are averaged by DDP. That step is skipped. A
scaler that found nothing by itself is told, so that all scales fall together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from paceline.errors import ConfigError


class Scaled(NamedTuple):
    """What a scaler said about the step that is to be taken."""

    scale: float | None
    """By which gradients are too large; None: they have been unscaled."""
    found_inf: bool

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """In place. Infinity that was found, and perhaps written over since, is there afterwards."""
        for index, gradient in enumerate(gradients):
            if self.scale is not None:
                gradient.mul_(1.0 / self.scale)
            if self.found_inf and index == 0:
                gradient[:1] = float("inf")


def check_scaler(triggered: bool, store_hosts: int) -> None:
    """Refuse a scaler where its steps could not be taken rightly."""
    if triggered:
        raise ConfigError(
            "--trigger adds gradients up that a GradScaler would scale differently. Leave one of them "
            "out, or use bfloat16, which needs no scaler."
        )
    if store_hosts > 1:
        raise ConfigError(
            f"a GradScaler needs a store on one host, but --store-hosts is {store_hosts}. Leave it out, or "
            "use bfloat16, which needs no scaler."
        )


def welcome_scalers(optimizer: torch.optim.Optimizer) -> None:
    """Let scalers leave the unscaling and the skipping to our `step`."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def taken_from(optimizer: torch.optim.Optimizer) -> Scaled | None:
    """What a scaler said, no longer to be read by others; None: no scaler calls."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    if found is None:
        return None
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
    return Scaled(None if scale is None else float(scale), bool(found))


def tell_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Let the scaler that calls us know of an overflow elsewhere; whether one was found that listens.

    torch passes an optimizer these numbers and not the scaler, which is needed rarely: so it is looked for
    among those who called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), GradScaler):
        frame = frame.f_back
    if frame is None:
        return False
    states = getattr(frame.f_locals["self"], "_per_optimizer_states", {})
    found = states.get(id(optimizer), {}).get("found_inf_per_device", {})
    for flag in found.values():
        flag.fill_(1.0)
    return bool(found)
