"""A worker with a store: its gradients live in shared memory, its weights come from there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import RunStopped
from paceline.runtime.checkpoints.optimizer_state import State
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages.workers import Push
from paceline.runtime.worker.emulation import Emulation
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.worker import Worker
from paceline.store.disk.checkpoint import model_state


class PacedWorker(Worker):
    """One of several workers with a store."""

    def __init__(self, link: StoreLink) -> None:
        super().__init__(link, Emulation(link.config, link.rank), peer=False)
        self._halted: WorkerState | None = None
        """Where this worker stood when it heard that the run is stopped."""
        self._looks = False
        """Whether to look for NaN here, where gradients are applied one by one: it is one thing less for the
        store. Where they are added up first, the store looks at the sum in the same pass."""

    # -- preparing ----------------------------------------------------------------------------

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        trainer = self._trainer
        trainer.bind(model, optimizer)
        ready = trainer.register(trainer.describe(), loader)
        self._looks = not ready.shared and self._link.config.store_hosts == 1
        trainer.replace_steps(self._step, self._zero_grad)
        trainer.fetch_state()
        return trainer.begin(ready, [model, *self._models], self._mention_incomplete)

    # -- a step -------------------------------------------------------------------------------

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: push it, and sleep until released."""
        trainer = self._trainer
        settings, finite = trainer.changed(), self._looks and trainer.binding.finite()
        self._exchange(trainer.push(compute_s, missing, self._reported(), settings, finite))

    def _exchange(self, push: Push) -> None:
        """Announce what lies in the segment, and sleep until released."""
        trainer = self._trainer
        try:
            release = self._link.push(push)
        except RunStopped:
            self._halted = trainer.standing()
            raise
        trainer.schedulers.position, trainer.tells = release.position, release.tell
        trainer.overflowed = release.skipped

    # -- evaluating and saving ----------------------------------------------------------------

    def _away(self) -> None:
        if self._model is not None:
            self._trainer.adopt()
            self._link.away()
            self._trainer.binding.pull()

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is not None:
            self._trainer.schedulers.position = self._link.back(values, seconds).position
            self._trainer.binding.pull()

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """Weights and what the optimizer remembers, both of one moment; buffers are this worker's own."""
        self._trainer.check_reaches_state()
        (tensors, values), layout = self._link.recall(weights=True), self._trainer.binding.layout
        views = [tensors.pop(f"model.{slot.name}") for slot in layout.parameters]
        return model_state(layout, views, self._link.segments[0].bytes), (tensors, values)

    def _whose(self) -> str:
        ahead = self._trainer.ahead
        return "a look-ahead of the store's weights" if ahead else "the weights that it read last"

    # -- the run ------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._trainer.leave(self._reported(), self._waits, self._halted, self._whose())
