"""A lone worker's look at its gradients: whether they are finite, and clipping them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


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
