"""Four equal blocks in a row, one per stage, for the benchmark of pipelines. Computing is emulated."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.pipeline import pipeline

STAGES, WIDTH, BATCH = 4, 16, 16


def blocks() -> nn.Sequential:
    """So small that computing them takes no time worth telling."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(STAGES)))


def loss(out: Tensor, target: Tensor) -> Tensor:
    """One number."""
    return (out - target).square().mean()


def main() -> None:
    """Train on so many batches."""
    batches = int(sys.argv[1])
    pace = paceline.join("adl")
    mesh = pace.mesh(stage=STAGES)
    model = blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(batches * BATCH, WIDTH)
    loader = DataLoader(TensorDataset(x, x), batch_size=BATCH)
    cuts = tuple(range(1, STAGES))
    pipe, loader = pipeline(pace, mesh, model, optimizer, loader, loss=loss, cuts=cuts)
    for given, wanted in loader:
        pipe.step(given, wanted)


if __name__ == "__main__":
    main()
