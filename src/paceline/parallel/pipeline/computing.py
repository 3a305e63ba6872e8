"""One stage's arithmetic: forward and backward of its blocks, apart in time, with what is kept in between.

What is kept of a batch is its input and where random numbers stood (to compute it once more, with the same
dropout), or the graph. With `stash` there is a copy of the weights, too, which the graph or the second
forward uses. Running statistics are counted in the first forward only: the
second one works on copies of the buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from paceline.errors import ConfigError
from paceline.parallel.pipeline.blocks import Row
from paceline.parallel.pipeline.engine import Backward, Forward, Schedule

Loss = Callable[[Tensor, Tensor], Tensor]


class PendingBackward(NamedTuple):
    """What waits for a gradient."""

    input: Tensor
    output: Tensor | None
    """With its graph; None: to be computed once more."""
    weights: dict[str, Tensor]
    """Copies; empty: the current ones."""
    random: Tensor | None


class Computing:
    """The blocks of one stage."""

    def __init__(self, row: Row, first: bool, loss: Loss | None, optimizer: torch.optim.Optimizer) -> None:
        self.row, self._first, self._loss, self._optimizer = row, first, loss, optimizer
        self.kept: dict[int, PendingBackward] = {}
        self.ahead = 0.0
        """Updates by which momentum is followed ahead of a forward; 0: not at all."""
        self.loss: Tensor | None = None
        """Of the batch that was forwarded last, at the last stage."""

    def forward(self, operation: Forward, x: Tensor, labels: Tensor | None) -> Tensor:
        """Compute a batch, and keep what its backward needs. The answer has no graph."""
        x = x.detach().requires_grad_(not self._first)
        if operation.keep == "graph":
            weights = self._copies(self.ahead) if operation.stash or self.ahead else {}
            out = self._call(x, weights)
            if self._loss is not None:
                assert labels is not None
                out = self._scalar(self._loss(out, labels))
                self.loss = out.detach()
            self.kept[operation.index] = PendingBackward(x, out, weights, None)
            return out.detach()
        weights = self._copies(0.0) if operation.stash else {}
        random = torch.get_rng_state()
        with torch.no_grad():
            out = self._call(x, self._copies(self.ahead) if self.ahead else {})
        self.kept[operation.index] = PendingBackward(x, None, weights, random)
        return out

    def backward(self, operation: Backward, gradient: Tensor | None) -> Tensor | None:
        """Back-propagate a batch: gradients are added to the parameters'; the input's is the answer."""
        kept = self.kept.pop(operation.index)
        out = kept.output if kept.output is not None else self._again(kept)
        if gradient is not None and operation.scale != 1.0:
            gradient = gradient * operation.scale
        torch.autograd.backward(out, gradient)
        for name, copy in kept.weights.items():
            _add(self.row.get_parameter(name), copy.grad)
        return None if self._first else kept.input.grad

    def average(self, batches: int) -> None:
        """Before an update: make the sum of these batches' gradients their mean."""
        gradients = [p.grad for p in self.row.parameters() if p.grad is not None]
        if batches > 1 and gradients:
            torch._foreach_mul_(gradients, 1.0 / batches)

    def _again(self, kept: PendingBackward) -> Tensor:
        """The second forward: the same dropout, and no trace in running statistics."""
        now = torch.get_rng_state()
        assert kept.random is not None
        torch.set_rng_state(kept.random)
        buffers = {name: buffer.clone() for name, buffer in self.row.named_buffers()}
        try:
            return self._call(kept.input, kept.weights | buffers)
        finally:
            torch.set_rng_state(now)

    def _call(self, x: Tensor, instead: dict[str, Tensor]) -> Tensor:
        if not instead:
            return self.row.forward(x)
        out: Tensor = functional_call(self.row, instead, (x,))
        return out

    def _copies(self, ahead: float) -> dict[str, Tensor]:
        """The weights of now, or those that momentum leads to after so many updates."""
        copies = {name: p.detach().clone() for name, p in self.row.named_parameters()}
        if ahead:
            for group in self._optimizer.param_groups:
                for p in group["params"]:
                    velocity = self._optimizer.state.get(p, {}).get("momentum_buffer")
                    if velocity is not None:
                        copies[self.row.name_of(p)].sub_(velocity, alpha=float(group["lr"]) * ahead)
        for name, p in self.row.named_parameters():
            copies[name].requires_grad_(p.requires_grad)
        return copies

    @staticmethod
    def _scalar(loss: Tensor) -> Tensor:
        if loss.numel() != 1:
            raise ConfigError(
                f"the loss is one number, got a tensor of shape {tuple(loss.shape)}. Average over the batch."
            )
        return loss


def _add(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    if gradient is None:
        return
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def ahead_of(schedule: Schedule, stage: int, optimizer: torch.optim.Optimizer) -> float:
    """How many updates lie between a batch's forward and its backward, if momentum is to be followed."""
    delay = schedule.delays.m[stage]
    if not schedule.predict or not delay:
        return 0.0
    if not isinstance(optimizer, torch.optim.SGD):
        raise ConfigError(
            f"predict follows SGD's momentum, and the optimizer is {type(optimizer).__name__}. Leave it out."
        )
    return (delay - (schedule.order == "backward_first")) / schedule.every
