"""A lone worker's look at its gradients: whether they are finite, and clipping them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gradients_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The numbers that it is about to step with.

    Looked up once each and without a detour: between two steps all of this has left the caches.
    """
    found = [
        gradient
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and (gradient := p.grad) is not None
    ]
    return [dense(gradient) if gradient.is_sparse else gradient for gradient in found]


def dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient, be it sparse or not."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def clip(gradients: list[Tensor], most: float) -> None:
    """To this norm together."""
    factor = min(1.0, most / (float(torch.nn.utils.get_total_norm(gradients)) + 1e-6))
    for gradient in gradients:
        gradient.mul_(factor)


def sums_are_finite(gradients: list[Tensor]) -> bool:
    """Then so is every element. The cheapest look at gradients on a CPU; elsewhere each one has to wait."""
    if not gradients or gradients[0].device.type != "cpu":
        return False
    return math.isfinite(abs(sum([gradient.sum().item() for gradient in gradients])))
