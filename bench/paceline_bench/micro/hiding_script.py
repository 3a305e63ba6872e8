"""What the benchmark of hidden communication trains: ten layers, next to no work, many bytes."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LAYERS = 10


def main() -> None:
    """One epoch, one sample per iteration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    options = parser.parse_args()
    pace = paceline.join()
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    samples = options.iterations * pace.size
    loader = DataLoader(TensorDataset(torch.randn(samples, width)), batch_size=1)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    main()
