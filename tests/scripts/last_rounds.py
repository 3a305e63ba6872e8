"""Every sample moves a weight of its own; gradients of two batches are added up for a step."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline


class Marked(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(samples, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class Stream(IterableDataset[Any]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Any:
        return ((row,) for row in self.x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    x = torch.eye(options.samples, dtype=torch.float64)
    pace = paceline.join("bsp")
    model: Any = Marked(options.samples)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    data = Stream(x) if options.stream else TensorDataset(x)
    loader: Any = DataLoader(data, batch_size=1)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    batches = 0
    for _ in pace.epochs(options.epochs):
        for (row,) in loader:
            model(row).mean().backward()
            batches += 1
            if batches % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


main()
