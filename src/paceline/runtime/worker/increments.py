"""A worker whose own optimizer steps, and whose store adds what that has changed (`--apply increments`).

`optimizer.step()` first is the plain step of torch, on this worker's own copy of the weights. Then the
weights are pushed as they are after it: the store knows what it had handed out, and adds the difference. The
release brings fresh weights, as always. What the optimizer remembers stays here, and is handed in for
checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.runtime.checkpoints.optimizer_state import State, give_state, in_order, state_of
from paceline.runtime.worker.optimizer.own_steps import OwnSteps
from paceline.runtime.worker.paced import PacedWorker
from paceline.store.optimizers import OptimizerSpec, check_suited
from paceline.store.together import title


class IncrementWorker(PacedWorker):
    """One of several workers with a store that only adds."""

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        trainer = self._trainer
        trainer.bind(model, optimizer)
        check_suited(optimizer)
        ready = trainer.register(OptimizerSpec(title(optimizer), ()), loader)
        self._steps = OwnSteps(trainer)
        self._recall()
        trainer.replace_steps(self._step, self._zero_grad)
        return self._training_begins(ready, model)

    def _recall(self) -> None:
        """In a run that goes on: what this worker's optimizer remembered."""
        if self._link.config.resume is not None and self._link.reaches_state:
            optimizer = self._trainer.optimizer
            tensors, values = self._link.recall(own=True)
            values = self._trainer.step_settings.give(optimizer, values)
            give_state(optimizer, self._trained(optimizer), (tensors, values))

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """Step, and push what came of it; gradients that are not finite are pushed instead, to be refused."""
        trainer, binding = self._trainer, self._trainer.binding
        fine = binding.finite() or binding.bad_parameter() is None
        if fine:
            self._take_step(frozenset(missing))
        if trainer.tells:
            self._hand_in(ahead=True)
        self._exchange(trainer.push(compute_s, (), self._reported(), None, binding.bring(stepped=fine)))

    def _take_step(self, missing: frozenset[int]) -> None:
        """With this worker's own gradient, clipped if that is asked for."""
        trainer, steps = self._trainer, self._steps
        norms = [norm for norm in (self._link.config.clip_norm, trainer.clip_to) if norm is not None]
        trainer.clip_to = None  # the store has nothing to clip
        with steps.showing(None, missing):
            if norms:
                steps.clip(min(norms))
            steps.take()

    def _trained(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return in_order(optimizer, self._trainer.binding.index)

    def _hand_in(self, ahead: bool) -> None:
        """What the optimizer remembers, for the run's checkpoint; `ahead` of the push of its last step."""
        if self._link.reaches_state:
            optimizer = self._trainer.optimizer
            tensors, values = state_of(optimizer, self._trained(optimizer))
            state = tensors, values | self._trainer.step_settings.of(optimizer)
            self._link.restore(state, own=True, ahead=ahead)

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """The store's weights, and what this worker's optimizer remembers."""
        return super()._state_now()[0], self._own_state()

    def _leave(self) -> None:
        if self._link.halted and self._trainer.begun and self._trainer.binding.attached:
            self._hand_in(ahead=False)
        super()._leave()
