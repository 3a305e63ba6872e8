"""An asynchronous parameter server, however it is reached: a flat tensor of gradients in, one of weights out.

The server has the optimizer and counts rounds for the learning rate, so that the rule is everybody's. Whoever
pushes gets the weights of that moment. A push is a whole step, and momentum is plain: it is what such servers
do. So without rates to try they get a lower one (`Rival.rates`).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from paceline_bench.cluster.other import OtherPace
from paceline_bench.cluster.script import options, warmed
from paceline_bench.cluster.tasks import TASKS
from paceline_bench.wrapped.server import FlatServer


class FlatWeights(nn.Module):
    """All of a model's weights as one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        whole = torch.cat([value.detach().flatten() for value in model.parameters()])
        self.weights = nn.Parameter(whole)


class ParameterServer(FlatServer):
    """Weights and an optimizer; a push is one step, answered with the weights and how many there were."""

    def __init__(self, told: argparse.Namespace, workers: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        task = TASKS[told.task]
        self._holder = FlatWeights(task.model(told.seed))
        self._optimizer = task.optimizer(self._holder, told.lr)
        round_ = told.batch * workers
        self._scheduler = LambdaLR(self._optimizer, lambda done: warmed(done, round_, told.warmup))
        self._workers, self._pushes = workers, 0

    def apply(self, gradient: Tensor) -> tuple[Tensor, int]:
        """A step; the weights, and how many pushes there were."""
        self._holder.weights.grad = gradient
        self._optimizer.step()
        self._pushes += 1
        if self._pushes % self._workers == 0:
            self._scheduler.step()
        return self._holder.weights.detach().clone(), self._pushes


def server_of(words: list[str], workers: int) -> ParameterServer:
    """The server of a body that is told these words."""
    return ParameterServer(options(words), workers)


class ServedPace(OtherPace):
    """A worker of such a server; a way to reach it is all that is missing."""

    def exchange(self, gradient: Tensor) -> tuple[Tensor, int]:
        """Push, and get weights and the number of pushes."""
        raise NotImplementedError

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Lay weights and gradients out flat; the step is the server's."""
        self.module, self.optimizer = model, optimizer
        self._weights = torch.cat([value.detach().flatten() for value in model.parameters()])
        self._gradient = torch.zeros_like(self._weights)
        at = 0
        for value in model.parameters():
            end = at + value.numel()
            value.data = self._weights[at:end].view_as(value)
            value.grad = self._gradient[at:end].view_as(value)
            at = end
        self.scheduler = Rounds()
        return model, self, self.deal(loader), self.scheduler

    def step(self) -> None:
        """In the optimizer's place."""
        self.computed()
        weights, pushes = self.exchange(self._gradient)
        self._weights.copy_(weights)
        self.scheduler.last_epoch = pushes // self.size
        self.samples = pushes * self._batch

    def zero_grad(self) -> None:
        """In the optimizer's place."""
        self._gradient.zero_()


class Rounds:
    """In the scheduler's place: the server counts."""

    last_epoch = 0

    def step(self) -> None:
        """Nothing."""
