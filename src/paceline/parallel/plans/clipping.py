"""torch's own clipping under a plan: a rank has parts of gradients, so their norm has to be that of all.

Scripts call `torch.nn.utils.clip_grad_norm_` between backward and step. Under a plan that is done as in one
process: gradients are made whole first, then clipped by the norm of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.parallel.plans.planned_pace import PlannedPace


def stand_in_for_clipping(made: Sequence[PlannedPace]) -> None:
    """From here on, in this process. `made`: the pace, once the script has one."""
    norm_, value_ = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_

    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *more: Any,
        **named: Any,
    ) -> Any:
        if not made or not made[0].prepared:
            return norm_(parameters, max_norm, norm_type, *more, **named)
        if norm_type != 2.0:
            raise ConfigError(f"under a plan gradients are clipped by their 2-norm, not {norm_type}.")
        return made[0].clip_these(_several(parameters), float(max_norm))

    def clip_grad_value_(parameters: Tensor | Iterable[Tensor], *more: Any, **named: Any) -> None:
        every = _several(parameters)
        if made and made[0].prepared:
            made[0].make_whole()
        value_(every, *more, **named)

    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
    torch.nn.utils.clip_grad_value_ = clip_grad_value_


def _several(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)
