"""An emulated device for HAP programs: every operation takes as long as that device would need for its part.

`--device-time` is what the device takes for forward and backward of the whole graph, times its `--slow`
factor; an operation has its share of it by flops, a third forward and two thirds backward. `--slow` alone
stretches what was measured. Missing time is slept, so four workers on two cores are four devices."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.config import RunConfig


class EmulatedDevice:
    """One rank's device."""

    def __init__(self, config: RunConfig, rank: int, flops: float) -> None:
        """`flops`: of the whole graph's forward pass."""
        self._per_flop = None if config.device_time_s is None else config.device_time_s / max(flops, 1.0)
        self._factor, self._jitter = config.slow.get(rank, 1.0), config.jitter
        self._random = random.Random(f"{config.seed}/{rank}")
        self.waits = self.overruns = 0
        """How often something was timed, and how often it really took longer than the device would."""

    def spend(self, flops: float, inputs: list[Tensor], work: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Carry an operation out in the device's time, and its backward pass as well."""
        began, span = time.perf_counter(), _BackwardSpan(self, flops)
        entered: list[Any] = [_enter(value, span) for value in inputs]
        made = work(entered)
        self.wait(began, flops / 3)
        if not made.requires_grad:
            return made
        left: Any = _Leave.apply(made, span)  # type: ignore[no-untyped-call]
        result: Tensor = left
        return result

    def wait(self, began: float, flops: float) -> None:
        """Until so much work would be done."""
        real = time.perf_counter() - began
        spread = 1.0 + self._jitter * self._random.uniform(-1, 1) if self._jitter else 1.0
        usual = real if self._per_flop is None else flops * self._per_flop
        self.waits += 1
        self.overruns += usual * self._factor * spread < real
        if (missing := usual * self._factor * spread - real) > 0:
            time.sleep(missing)


class _BackwardSpan:
    """The backward pass of one operation: from its result's gradient to its inputs'."""

    def __init__(self, device: EmulatedDevice, flops: float) -> None:
        self.device, self.flops, self.began = device, flops, 0.0
        self.entered = False

    def begin(self) -> None:
        self.began = time.perf_counter()
        if not self.entered:  # nothing before it wants a gradient
            self.end()

    def end(self) -> None:
        self.device.wait(self.began, 2 * self.flops / 3)


def _enter(value: Tensor, span: _BackwardSpan) -> Any:
    if value.grad_fn is None or not value.requires_grad:
        return value
    span.entered = True
    return _EnterSpan.apply(value, span)  # type: ignore[no-untyped-call]


class _EnterSpan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.span.end()
        return grads[0], None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, span: _BackwardSpan) -> Tensor:
        ctx.span = span
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.span.begin()
        return grads[0], None
