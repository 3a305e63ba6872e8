"""Models and steps that real runs train; tests train the same ones in plain PyTorch, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Optimizer = torch.optim.Optimizer
Iteration = Callable[[nn.Module, Optimizer, Tensor, Tensor], Tensor]


def tabular(samples: int) -> tuple[Tensor, Tensor]:
    """Six numbers and one of three classes per sample."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def images(samples: int) -> tuple[Tensor, Tensor]:
    """Small pictures of three classes."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(samples, 2, 6, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    """Four of ten tokens per sample."""
    generator = torch.Generator().manual_seed(13)
    x = torch.randint(10, (samples, 4), generator=generator)
    return x, torch.randint(3, (samples,), generator=generator)


def counts(samples: int) -> tuple[Tensor, Tensor]:
    """Whole numbers, so that sums of gradients are exact."""
    generator = torch.Generator().manual_seed(14)
    x = torch.randint(-8, 9, (samples, 5), generator=generator).double()
    return x, torch.zeros(samples)


def ordinary(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward, step, zero."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def noisy() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


class Sum(nn.Module):
    """The gradient of one sample is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def add_up(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() * 0


@dataclass(frozen=True)
class Case:
    """Something to train."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], Optimizer] = momentum
    data: Callable[[int], tuple[Tensor, Tensor]] = tabular
    iteration: Iteration = ordinary
    dtype: torch.dtype = torch.float64

    def build(self) -> tuple[nn.Module, Optimizer]:
        """The model with the same initial weights everywhere, and its optimizer."""
        torch.manual_seed(5)
        model = self.model().to(self.dtype)
        return model, self.optimizer(model)

    def samples(self, number: int) -> tuple[Tensor, Tensor]:
        """The training data."""
        x, y = self.data(number)
        return (x.to(self.dtype) if x.is_floating_point() else x), y


def large_batch(case: Case, samples: int, rounds: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """One process in plain PyTorch, one step per round."""
    model, optimizer = case.build()
    x, y = case.samples(samples)
    for indices in rounds:
        case.iteration(model, optimizer, x[list(indices)], y[list(indices)])
    return model.state_dict()


def in_rounds(samples: int, batch: int, workers: int, epochs: int) -> list[list[int]]:
    """What each round of lockstep works on: batch after batch in order, epoch after epoch."""
    batches = [
        list(range(first, min(first + batch, samples)))
        for _ in range(epochs)
        for first in range(0, samples, batch)
    ]
    together = [batches[i : i + workers] for i in range(0, len(batches), workers)]
    return [[index for batch in each for index in batch] for each in together]


CASES = {
    "momentum": Case(),
    "adamw": Case(optimizer=adamw),
    "sgd": Case(optimizer=plain_sgd),
    "noisy": Case(noisy, dtype=torch.float32),
    "noisy_adamw": Case(noisy, adamw, dtype=torch.float32),
    "single": Case(dtype=torch.float32),
    "exact": Case(Sum, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), counts, add_up),
}
