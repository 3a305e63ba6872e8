"""Steps of a worker's own optimizer at other rates, or without being remembered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor

from paceline.protocols.core.operations import Preview, Step
from paceline.store.vector import FlatVector


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, operation: Step | Preview) -> Iterator[None]:
    """What the optimizer does in here it does as the operation says."""
    if isinstance(operation, Preview):
        with _forgetting(optimizer):
            yield
    else:
        with _at(optimizer, operation.rates):
            yield


def rates(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rates of its groups."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


class OptimizerMemory:
    """What an optimizer remembers of its parameters, in vectors."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._views: dict[str, list[Tensor]] = {}

    def recall(self, make: Callable[[], tuple[FlatVector, list[Tensor]]]) -> dict[str, FlatVector]:
        """A copy; `make` gives a vector of zeros, and where each parameter's part of it lies."""
        vectors: dict[str, FlatVector] = {}
        self._views = {}
        for name in self._names():
            vectors[name], self._views[name] = make()
            for view, value in self._pairs(name):
                view.copy_(value)
        return vectors

    def remember(self) -> None:
        """Write back what was made of it, where there was something."""
        for name in self._views:
            for view, value in self._pairs(name):
                value.copy_(view)
        self._views = {}

    def _names(self) -> list[str]:
        states = [(p, self._optimizer.state[p]) for p in self._parameters if p in self._optimizer.state]
        found = {name for p, state in states for name, value in state.items() if _like(value, p)}
        return sorted(found)

    def _pairs(self, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        for p, view in zip(self._parameters, self._views[name], strict=True):
            value = self._optimizer.state[p].get(name) if p in self._optimizer.state else None
            if _like(value, p):
                yield view, value


def _like(value: Any, parameter: Tensor) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point()


@contextmanager
def _at(optimizer: torch.optim.Optimizer, given: tuple[float, ...]) -> Iterator[None]:
    """With these learning rates."""
    if not given or given == rates(optimizer):
        yield
        return
    groups = [group for group in optimizer.param_groups if "lr" in group]
    kept = [group["lr"] for group in groups]
    for group, old, rate in zip(groups, kept, given, strict=True):
        group["lr"] = torch.full_like(old, rate) if isinstance(old, Tensor) else rate
    try:
        yield
    finally:
        for group, old in zip(groups, kept, strict=True):
            group["lr"] = old


@contextmanager
def _forgetting(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Whatever it remembers in here is dropped: it works on copies of its state."""
    moving = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    kept: dict[Tensor, Any] = {p: optimizer.state[p] for p in moving if p in optimizer.state}
    for p, state in kept.items():
        optimizer.state[p] = copy.deepcopy(state)
    try:
        yield
    finally:
        for p in moving:
            optimizer.state.pop(p, None)
        optimizer.state.update(kept)
