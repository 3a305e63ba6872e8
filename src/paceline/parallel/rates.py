"""Learning rates by the batch that is applied: all stages change theirs for the same batch.

A script steps its scheduler after `pipe.step()` as ever. A stage whose updates lag behind takes that step
when the batches have been applied that had gone in by then. Stages apply all batches in order, so each
of them sees the rates that one process would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError
from paceline.runtime.worker.optimizer.schedules import catch_up, follow


class Deferred:
    """Puts a scheduler's steps off until their time has come."""

    def __init__(
        self, scheduler: LRScheduler | None, optimizer: torch.optim.Optimizer, idle: Callable[[], bool]
    ) -> None:
        if scheduler is not None and scheduler.optimizer is not optimizer:
            raise ConfigError("the scheduler belongs to another optimizer than the pipeline's. Give its own.")
        self.fed = self._applied = self.steps = 0
        self._scheduler, self._optimizer, self._idle = scheduler, optimizer, idle
        self.check_given()
        self._waiting: deque[int] = deque()
        self._missed = 0
        if scheduler is not None:
            follow(scheduler, self._called)

    def check_given(self) -> None:
        """Refuse a scheduler that nobody has told us of, also one that was made later."""
        if self._scheduler is None and hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            raise ConfigError(
                "the optimizer has a learning-rate scheduler that the pipeline was not given: stages would "
                "step it for different batches. Make it before, and give it: pipeline(..., "
                "scheduler=scheduler)."
            )

    def applied(self, batches: int) -> None:
        """So many more batches are in the weights."""
        self._applied += batches
        while self._waiting and self._waiting[0] <= self._applied:
            self._waiting.popleft()
            self._take(1)

    def catch_up(self, steps: int) -> None:
        """So many were taken before."""
        self._missed, self.steps = 0, steps
        if self._scheduler is not None:
            for _ in range(steps):
                self._missed = 1
                catch_up(self._scheduler, 1)
            self._missed = 0

    def _called(self) -> int:
        """The script steps the scheduler: how many steps it takes now."""
        if self._missed:  # by ourselves
            return 1
        if self._idle():
            return 0
        if self._applied < self.fed:
            self._waiting.append(self.fed)
            return 0
        self.steps += 1
        return 1

    def _take(self, steps: int) -> None:
        assert self._scheduler is not None
        self._missed = 1
        for _ in range(steps):
            self._scheduler.step()
        self._missed = 0
        self.steps += steps
