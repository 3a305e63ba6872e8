"""A pipeline of one stage and one copy: plain PyTorch, for scripts that run alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.parallel.loading import check_loader
from paceline.parallel.pipeline.blocks import as_blocks
from paceline.runtime.worker.pace import Pace


class Whole:
    """The unsplit model, behind the same words."""

    def __init__(
        self,
        pace: Pace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        self._pace, self._model, self._optimizer, self._loss = pace, model, optimizer, loss

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward, backward and a step of the optimizer; the loss."""
        loss = self._loss(self._model(x), y)
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._pace.report(loss=loss.item())
        return loss.detach()

    def settle(self) -> None:
        """Nothing is ever under way."""


def unsplit(
    pace: Pace,
    model: nn.Module | list[nn.Module],
    optimizer: torch.optim.Optimizer,
    loader: object,
    loss: Callable[[Tensor, Tensor], Tensor],
    scheduler: object | None,
) -> tuple[Whole, object]:
    """Tie everything to a run of one worker."""
    check_loader(loader)
    whole = as_blocks(model)
    given = [whole, optimizer, loader, *([] if scheduler is None else [scheduler])]
    prepared = pace.prepare(*given)
    return Whole(pace, whole, optimizer, loss), prepared[2]
