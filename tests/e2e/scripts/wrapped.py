"""A tiny training whose loader and optimizer are wrapped by another library, or by classes of its shape."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--by", choices=["nothing", "shape", "accelerate"], default="nothing")
parser.add_argument("--late", action="store_true", help="wrap what pace.prepare gave back")
asked = parser.parse_args()


class Within:
    """Passes for the DataLoader that it holds, as accelerate's loaders do."""

    def __init__(self, base: Any) -> None:
        self.base_dataloader = base

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return self.base_dataloader.__class__

    def __reduce__(self) -> Any:
        return (Ahead, *super().__reduce__()[1:])


class Ahead(Within):
    """Knows which batch is the last, because it reads one ahead."""

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.base_dataloader)
        batch = next(batches, None)
        while batch is not None:
            following = next(batches, None)
            yield batch
            batch = following


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that holds another, and was never set up as one itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


def wrapped(model: Any, optimizer: Any, loader: Any) -> Any:
    if asked.by == "nothing":
        return model, optimizer, loader
    if asked.by == "shape":
        rebuilt = DataLoader(loader.dataset, batch_sampler=loader.batch_sampler)
        return model, AcceleratedOptimizer(optimizer), Ahead(rebuilt)
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model, optimizer, loader)


pace = paceline.join(environment=asked.by == "nothing")
assert ("RANK" in os.environ) == (asked.by == "nothing")
torch.manual_seed(0)
data = TensorDataset(torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 1, dtype=torch.float64))
trained: Any = torch.nn.Linear(4, 1, dtype=torch.float64)
objects: Any = trained, torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9), DataLoader(data, 4)
if asked.late:
    model, optimizer, loader = wrapped(*pace.prepare(*objects))
else:
    model, optimizer, loader = pace.prepare(*wrapped(*objects))
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
