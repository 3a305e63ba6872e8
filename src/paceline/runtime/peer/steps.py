"""Steps of a worker's own optimizer: with gradients from elsewhere, at other rates, or not remembered."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor

from paceline.protocols.core.operations import Preview, Step
from paceline.protocols.core.parts import Part
from paceline.runtime.peer.optimizer import not_finite, reads_only
from paceline.runtime.peer.state import PeerState
from paceline.runtime.run.member import smallest
from paceline.runtime.worker.optimizer.own_steps import OwnSteps
from paceline.store.cutting import blank
from paceline.store.vector import FlatVector


class PeerSteps:
    """One worker's."""

    def __init__(self, peer: PeerState, memory_at: Callable[[int], Tensor | None]) -> None:
        """Made while the optimizers' steps are still plain. `memory_at` tells where answers lie."""
        self._peer, self._memory_at, self._trainer = peer, memory_at, peer.trainer
        self._own = OwnSteps(peer.trainer)
        self._remembered = OptimizerMemory(peer.trainer.optimizer, peer.trainer.binding.trained)
        self._blank: tuple[FlatVector, list[Tensor]] | None = None
        self._shown: dict[int, list[Tensor]] = {}
        self.skipped = 0
        """Gradients that were not finite."""

    def apply(self, operation: Step | Preview) -> None:
        """Step with a gradient."""
        gradient, part, trainer = operation.gradient, operation.part, self._trainer
        assert isinstance(gradient, FlatVector)
        norm = self._peer.cut.length(gradient, part)
        if not math.isfinite(norm):
            return self._refuse()
        if trainer.shared:
            return None  # the run has, for all
        clip = smallest(trainer.link.config.clip_norm, trainer.clip_to)
        if clip is not None and norm > clip:
            gradient = gradient * (clip / (norm + 1e-6))
        missing = gradient.missing | self._peer.cut.others(part)
        visible = self._visible(gradient, part)
        with self._own.showing(visible, missing), stepping(trainer.optimizer, operation):
            self._own.take()
        return None

    def nothing(self) -> FlatVector:
        """A gradient that takes no part: it was not finite."""
        self._refuse()
        for part in self._peer.gradient:
            part.zero_()
        nothing = FlatVector(self._peer.gradient, frozenset(range(len(self._peer.layout.trained))))
        nothing.norm = 0.0
        return nothing

    def reset(self) -> None:
        """The optimizer forgets."""
        self._trainer.optimizer.state.clear()

    def recall(self) -> dict[str, FlatVector]:
        """What the optimizer remembers, in vectors."""
        return self._remembered.recall(lambda: blank(self._peer.layout))

    def remember(self) -> None:
        """Let it remember what was made of them."""
        self._remembered.remember()

    def _visible(self, gradient: FlatVector, part: Part | None) -> list[Tensor] | None:
        """The gradients that the optimizer is to read; None: those of this worker's segment."""
        start = gradient.parts[0].data_ptr()
        if start == self._peer.gradient[0].data_ptr():
            return None
        memory = self._memory_at(start)
        if memory is None or not reads_only(self._trainer.optimizer):
            if part is None:
                FlatVector(self._peer.gradient)[:] = gradient
                return None
            return self._beside(gradient, part)  # the rest of the worker's own is still needed
        if start not in self._shown:
            self._shown[start] = [slot.view(memory, slot.offset) for slot in self._peer.layout.trained]
        return self._shown[start]

    def _beside(self, gradient: FlatVector, part: Part) -> list[Tensor]:
        """A part of a gradient in memory of its own."""
        if self._blank is None:
            self._blank = blank(self._peer.layout)
        self._peer.cut.copy(gradient, self._blank[0], part)
        return self._blank[1]

    def _refuse(self) -> None:
        """What was to be applied is not finite."""
        trainer = self._trainer
        if trainer.scaled:
            trainer.overflowed = True
            return
        if trainer.link.config.bad_gradient == "skip":
            self.skipped += 1
            return
        raise not_finite(trainer.link.rank, trainer.binding.bad_parameter())


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
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for p, state in kept.items():
        optimizer.state[p] = copy.deepcopy(state)
    try:
        yield
    finally:
        for p in moving:
            optimizer.state.pop(p, None)
        optimizer.state.update(kept)
        for group, old in zip(optimizer.param_groups, settings, strict=True):
            group.update(old)
