"""Small problems for peers: gradients, optimizers, and what one process would make of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Gradient = Callable[[int, int, Tensor], Tensor]
"""Rank, iteration (from 0) and parameters in, gradient out."""
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
Samples = Callable[[int, int], int]

SIZE = 6


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def noisy(seed: int) -> Gradient:
    """Quadratics of unequal curvature and unequal optima, with noise: nothing cancels by accident."""

    def gradient(rank: int, iteration: int, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(1000 * seed + rank)
        curvature = torch.rand(SIZE, generator=own, dtype=torch.float64) + 0.5
        optimum = torch.randn(SIZE, generator=own, dtype=torch.float64)
        drawn = torch.Generator().manual_seed(seed + 7919 * rank + 104729 * iteration)
        return curvature * (x - optimum) + 0.3 * torch.randn(SIZE, generator=drawn, dtype=torch.float64)

    return gradient


def nothing(rank: int, iteration: int, x: Tensor) -> Tensor:
    """No gradient at all: what is left is the mixing."""
    return torch.zeros_like(x)


def large_batch(
    workers: int,
    iterations: int,
    gradient: Gradient,
    optimizer: MakeOptimizer = sgd,
    samples: Samples = lambda rank, iteration: 4,
) -> Tensor:
    """The reference: one process, every step with the mean gradient of all workers' batches."""
    x = torch.linspace(-1, 1, SIZE, dtype=torch.float64)
    steps = optimizer([x])
    for iteration in range(iterations):
        sizes = [samples(rank, iteration) for rank in range(workers)]
        gradients = [gradient(rank, iteration, x.clone()) * sizes[rank] for rank in range(workers)]
        x.grad = torch.stack(gradients).sum(0) / sum(sizes)
        steps.step()
    return x
