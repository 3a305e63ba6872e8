"""Steps that a script's optimizers take here, in the worker, and not in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.runtime.worker.trainer import Trainer
from paceline.store.together import parts_of


class OwnSteps:
    """The plain steps of one worker's optimizers, whose `step` means an exchange by now."""

    def __init__(self, trainer: Trainer) -> None:
        """Made while the optimizers' steps are still plain."""
        self._trainer = trainer
        self._plain: list[Callable[[], Any]] = [part.step for part in parts_of(trainer.optimizer)]

    @contextmanager
    def showing(self, views: list[Tensor] | None, missing: frozenset[int]) -> Iterator[None]:
        """In here parameters have these gradients; None: the worker's own."""
        binding = self._trainer.binding
        binding.show_gradients(views, missing)
        yield
        binding.show_gradients(None)

    def take(self) -> None:
        """Step with the gradients that are shown. Weights that the optimizer has put elsewhere come back."""
        which, trainer = self._trainer.which, self._trainer
        with trainer.step_settings.watched(parts_of(trainer.optimizer)[which]):
            self._plain[which]()
        self._trainer.binding.adopt_weights()

    def clip(self, max_norm: float) -> None:
        """Clip the gradients that are shown, as torch does."""
        optimizer = parts_of(self._trainer.optimizer)[self._trainer.which]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
