"""Every sample moves a weight of its own, so that the weights tell what was trained on; one sample is NaN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES, BAD = 12, 7


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def main() -> None:
    x = torch.eye(SAMPLES, dtype=torch.float64)
    x[BAD, BAD] = float("nan")
    pace = paceline.join("asp")
    model: Any = Marked()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, loader = pace.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=1))
    for (row,) in loader:
        optimizer.zero_grad()
        model(row).mean().backward()
        optimizer.step()


main()
