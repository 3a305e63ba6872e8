"""A worker among others, as far as it is the same with a store and without: its trainer does most of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.runtime.messages.workers import Ready
from paceline.runtime.worker.emulation import Emulation, VirtualDevice
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.model.model_calls import notice, refuse_renorming
from paceline.runtime.worker.pace import Metrics, Pace
from paceline.runtime.worker.trainer import Trainer


class Worker(Pace):
    """One of several. How an iteration goes, and what is evaluated and saved, its kinds know."""

    def __init__(self, link: StoreLink, device: Emulation | VirtualDevice, peer: bool) -> None:
        super().__init__(link.rank, link.config.workers)
        self._link = link
        self._trainer = Trainer(link, device, peer)

    @property
    def lead(self) -> bool:
        return self._link.lead

    @abstractmethod
    def _iterate(self, compute_s: float, missing: tuple[int, ...]) -> None:
        """The gradient is complete: go on to where the next one is needed."""

    @abstractmethod
    def _whose(self) -> str:
        """What its model is, as long as that is not what the run evaluates and saves."""

    def _heed_after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._trainer.after_step = self._after_step.optimizers
        super()._heed_after_step(optimizer)

    def _training_begins(self, ready: Ready, model: nn.Module) -> Any:
        """The loader that the script is to have, once its models are watched."""
        models = [model, *self._models]
        if self._trainer.fed:
            refuse_renorming(self._models)
        notice("state_dict", models, self._mention_incomplete)
        if self._trainer.ahead:
            notice("eval", models, self._mention_ahead)
        return self._trainer.begin(ready)

    # -- training -----------------------------------------------------------------------------

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        self._trainer.schedulers.prepare(scheduler)

    def _watch_length(self, scheduler: LRScheduler) -> None:
        self._trainer.watch_length(scheduler)

    def _step(self, which: int, closure: Callable[[], Any] | None = None) -> Any:
        self._check_here("optimizer.step()")
        return self._trainer.step(which, closure, self._iterate)

    def _zero_grad(self, which: int, set_to_none: bool = True) -> None:
        self._trainer.clear(which, set_to_none)

    def _clip(self, max_norm: float) -> None:
        self._trainer.clip(max_norm)

    def report(self, **values: float) -> None:
        super().report(**self._trainer.intake.counted(values))

    # -- the run ------------------------------------------------------------------------------

    def evaluate(self, fn: Callable[..., Metrics]) -> Mapping[str, float] | None:
        figures = super().evaluate(fn)
        if figures is not None:
            self._trainer.figure.evaluated()
        return figures

    def _at(self) -> int:
        return self._trainer.schedulers.position

    def _mention_incomplete(self) -> None:
        if not (self._left or self._evaluating):
            self._trainer.mention_incomplete(self._whose())

    def _mention_ahead(self) -> None:
        if not (self._left or self._evaluating):
            self._link.say(
                f"rank {self.rank} calls model.eval() on a look-ahead of the store's weights, which the run "
                "neither evaluates nor saves. Evaluate with pace.evaluate(fn), after pace.leave(), or with "
                "--correct none"
            )

    def _idle(self) -> bool:
        return self._trainer.intake.resumed

    def _swap(self, data: bytes, more: bool) -> dict[int, bytes]:
        return self._trainer.swap(data, more)

    def _plan(self, epochs: int) -> None:
        self._trainer.planned = epochs
        self._link.plan(epochs)

    @property
    def stopped(self) -> bool:
        return self._link.enough

    def _end_work(self, why: str) -> None:
        self._trainer.end_work(why)

    def _warn(self, text: str) -> None:
        self._link.say(text)

    def end(self, error: BaseException | None, text: str) -> None:
        self._link.end(error, text, self.depart)
