"""DANA's memory as torch's optimizer would have it, and the other way: what scripts save and load.

In plain terms the momentum of a run is the mean of its workers' momenta: with equal shares of all in one
flush it is what torch's optimizer has, exactly. What is loaded becomes every worker's own, whole. Adam's
moments are handed over without their bias, and get that of the steps which are saved beside them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.store.corrections.dana import DanaAdam, Momentum
from paceline.store.corrections.spans import Vectors
from paceline.store.optimizers import GroupSettings, OptimizerSpec

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain values, both under `number.name`."""


class Momenta:
    """DANA's vectors in one store."""

    def __init__(self, spec: OptimizerSpec, momentum: Momentum, second: Vectors | None) -> None:
        """`second`: Adam's second moment."""
        self._momentum, self._second = momentum, second
        self._settings = [group.settings for group in spec.groups]
        places = ((number, index) for number, group in enumerate(spec.groups) for index in group.parameters)
        self._places = dict(enumerate(places))
        """Parameter group, and index among the trained ones, as the optimizer counts its parameters."""

    # -- what a script saves ------------------------------------------------------------------

    def saved(self, owns: Sequence[tuple[Vectors, Sequence[float]]]) -> dict[str, Tensor]:
        """What torch's optimizer would go on from. `owns`: momenta, and by group what removes their bias."""
        tensors: dict[str, Tensor] = {}
        for number, (group, index) in self._places.items() if owns else ():
            mean = torch.zeros_like(owns[0][0].views[index])
            for own, weights in owns:
                mean.add_(own.views[index], alpha=weights[group] / len(owns))
            tensors |= {f"{number}.{key}": each for key, each in self._told(group, index, mean).items()}
        return tensors

    def _told(self, group: int, index: int, mean: Tensor) -> dict[str, Tensor]:
        settings, second = self._settings[group], self._second
        if not isinstance(self._momentum, DanaAdam) or second is None:
            return {"momentum_buffer": mean} if settings["momentum"] else {}
        return _adam(settings, mean, second.views[index], self._momentum.left_of_second[group])

    # -- what a script loads ------------------------------------------------------------------

    def load(self, state: State, owns: Sequence[Vectors], workers: Collection[int]) -> None:
        """Go on from what torch's optimizer had. `owns`: the momenta of these workers."""
        known: dict[int, dict[str, Any]] = {number: {} for number in self._places}
        for name, value in [*state[0].items(), *state[1].items()]:
            begin, key = name.split(".", 1)
            known[int(begin)][key] = value
        steps = [0.0] * len(self._settings)
        for number, (group, _) in self._places.items():
            steps[group] = max(steps[group], _steps_in(known[number]))
        self._momentum.begin_at(steps, self._settings, workers)
        for number, (group, index) in self._places.items():
            first, second = self._moments(group, known[number], steps[group])
            for own in owns:
                _put(own.views[index], first)
            if self._second is not None:
                _put(self._second.views[index], second)

    def _moments(self, group: int, one: dict[str, Any], steps: float) -> tuple[Any, Any]:
        """What becomes a parameter's momentum, and its second moment; None: zeros. `steps`: its group's."""
        own = _steps_in(one)
        if self._second is None:
            return one.get("momentum_buffer"), None
        if not own:
            return None, None
        betas = self._settings[group]["betas"]
        first, second = ((1 - beta**steps) / (1 - beta**own) for beta in betas)
        return one["exp_avg"] * first, one["exp_avg_sq"] * second


def _adam(settings: GroupSettings, mean: Tensor, second: Tensor, left: float) -> dict[str, Tensor]:
    """Nothing of a parameter that no gradient has reached: torch counts its steps from there."""
    if not bool(second.any()):
        return {}
    beta1, beta2 = settings["betas"]
    steps = _steps_behind(left, beta2)
    told = {
        "step": torch.tensor(float(steps)),
        "exp_avg": mean * (1 - beta1**steps),
        "exp_avg_sq": second * ((1 - beta2**steps) / (1 - left)),
    }
    if "momentum_decay" in settings:
        told["mu_product"] = torch.tensor(_mu_product(steps, beta1, settings["momentum_decay"]))
    return told


def _steps_behind(left: float, beta: float) -> int:
    """After how many steps this is left of the zeros that a moment began with."""
    if not 0 < beta < 1:
        return 1
    return max(1, round(math.log(max(left, sys.float_info.min)) / math.log(beta)))


def _mu_product(steps: int, beta: float, decay: float) -> float:
    """What torch's NAdam keeps of its momentum's schedule."""
    product, step = 1.0, 0
    while step < steps and product > 0:
        step += 1
        product *= beta * (1 - 0.5 * 0.96 ** (step * decay))
    return product


def _steps_in(one: dict[str, Any]) -> float:
    return float(one.get("step", 0.0))


def _put(into: Tensor, value: Tensor | None) -> None:
    if value is None:
        into.zero_()
    else:
        into.copy_(value)
