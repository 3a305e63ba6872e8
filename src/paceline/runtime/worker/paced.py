"""A worker with a store: its gradients live in shared memory, its weights come from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import RunStopped
from paceline.runtime.checkpoints.optimizer_state import State
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.worker.emulation import Emulation
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.pace import Pace
from paceline.runtime.worker.trainer import Trainer
from paceline.store.disk.checkpoint import model_state


class PacedWorker(Pace):
    """One of several workers with a store."""

    def __init__(self, link: StoreLink) -> None:
        super().__init__(link.rank, link.config.workers)
        self._link = link
        self._trainer = Trainer(link, Emulation(link.config, link.rank))
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

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        self._trainer.schedulers.prepare(scheduler)

    def _mention_misfit(self, scheduler: LRScheduler) -> None:
        self._trainer.mention_misfit(scheduler)

    # -- a step -------------------------------------------------------------------------------

    def _step(self, which: int, closure: Callable[[], Any] | None = None) -> Any:
        self._check_here("optimizer.step()")
        return self._trainer.step(which, closure, self._iterate)

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        self._trainer.binding.zero(set_to_none, which)

    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: push it, and sleep until released."""
        trainer = self._trainer
        settings, finite = trainer.changed(), self._looks and trainer.binding.finite()
        push = trainer.push(compute_s, missing, self._reported(), settings, finite)
        try:
            release = self._link.push(push)
        except RunStopped:
            self._halted = trainer.standing()
            raise
        trainer.schedulers.position, trainer.tells = release.position, release.tell
        trainer.overflowed = release.skipped

    def _clip(self, max_norm: float) -> None:
        self._trainer.clip(max_norm)

    def report(self, **values: float) -> None:
        super().report(**self._trainer.intake.counted(values))

    # -- evaluating and saving ----------------------------------------------------------------

    def _away(self) -> None:
        if self._model is not None:
            self._link.away()
            self._trainer.binding.pull()

    def _back(self, values: dict[str, float], seconds: float) -> None:
        if self._model is not None:
            self._trainer.schedulers.position = self._link.back(values, seconds).position
            self._trainer.binding.pull()

    def _at(self) -> int:
        return self._trainer.schedulers.position

    def _state_now(self) -> tuple[dict[str, Tensor], State]:
        """Weights and what the optimizer remembers, both of one moment; buffers are this worker's own."""
        self._trainer.check_reaches_state()
        (tensors, values), layout = self._link.recall(weights=True), self._trainer.binding.layout
        views = [tensors.pop(f"model.{slot.name}") for slot in layout.parameters]
        return model_state(layout, views, self._link.segments[0].bytes), (tensors, values)

    def _mention_incomplete(self) -> None:
        if not (self._left or self._evaluating):
            self._trainer.mention_incomplete(self._whose())

    def _whose(self) -> str:
        ahead = self._trainer.ahead
        return "a look-ahead of the store's weights" if ahead else "the weights that it read last"

    # -- the run ------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return self._trainer.intake.resumed

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        return self._trainer.swap(data, more)

    def _plan(self, epochs: int) -> None:
        self._link.plan(epochs)

    @property
    def stopped(self) -> bool:
        return self._link.enough

    def _end_work(self, why: str) -> None:
        self._trainer.end_work(why)

    def _warn(self, text: str) -> None:
        self._link.say(text)

    def _leave(self) -> None:
        self._trainer.leave(self._reported(), self._waits, self._halted, self._whose())

    def end(self, error: BaseException | None, text: str) -> None:
        self._link.end(error, text, self.depart)
