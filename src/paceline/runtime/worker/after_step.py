"""What a script has run on the weights after every step (`pace.after_step`); every kind of `Pace` has one.

Where steps are taken in this process it runs as a hook on them. Where a store takes them, it runs here too,
while this worker sleeps, and the store takes over what came of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.store.together import parts_of


class _Registered(NamedTuple):
    call: Callable[[Sequence[nn.Module]], Any]
    """The function, given the prepared models."""
    optimizer: torch.optim.Optimizer | None
    """After whose steps; None: after those of every one."""


class AfterStep:
    """One worker's functions."""

    def __init__(self) -> None:
        self._registered: list[_Registered] = []
        self._models: Sequence[nn.Module] = ()
        self._by_optimizer: list[list[Callable[[Sequence[nn.Module]], Any]]] = []

    def add(self, fn: Callable[..., Any], optimizer: torch.optim.Optimizer | None) -> None:
        """Before models and optimizers are known to the run."""
        if not callable(fn):
            raise ConfigError(f"pace.after_step() takes a function, got {fn!r}.")
        call = (lambda models: fn(*models)) if _takes_models(fn) else lambda _: fn()
        self._registered.append(_Registered(call, optimizer))

    def bind(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """These were prepared."""
        parts, self._models = parts_of(optimizer), models
        strange = next((x.optimizer for x in self._registered if _unknown(x.optimizer, parts)), None)
        if strange is not None:
            raise ConfigError(
                f"pace.after_step() was given a {type(strange).__name__} that pace.prepare() was not. Give "
                "it to both, or leave it out to have the function run after every optimizer's steps."
            )
        self._by_optimizer = [
            [each.call for each in self._registered if each.optimizer is None or each.optimizer is part]
            for part in parts
        ]

    @property
    def optimizers(self) -> tuple[int, ...]:
        """The numbers of the optimizers after whose steps there is something to run."""
        return tuple(number for number, found in enumerate(self._by_optimizer) if found)

    def run(self, which: int) -> None:
        """One of the optimizers has stepped."""
        with torch.no_grad():
            for call in self._by_optimizer[which]:
                call(self._models)

    def hook(self, optimizer: torch.optim.Optimizer) -> None:
        """Have it run by the optimizers' own steps."""
        parts = parts_of(optimizer)
        for which in self.optimizers:
            parts[which].register_step_post_hook(lambda *_, which=which: self.run(which))

    def refuse(self, why: str) -> None:
        """There is no model here that it could run on."""
        if self._registered:
            raise ConfigError(f"pace.after_step(fn) needs the whole model in one place, but {why}")


def _takes_models(fn: Callable[..., Any]) -> bool:
    """What has a default is the script's own (`lambda model=model: ...`)."""
    named = inspect.signature(fn).parameters.values()
    return any(each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in named)


def _unknown(optimizer: torch.optim.Optimizer | None, parts: Sequence[torch.optim.Optimizer]) -> bool:
    return optimizer is not None and not any(optimizer is part for part in parts)
