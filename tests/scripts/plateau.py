"""A rate that falls when a figure does not improve, which rank 0 evaluates: kept there, or `--shared`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shared", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    pace = paceline.join("asp")
    model: Any = nn.Linear(4, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)
    plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(4):
        for x, y in loader:
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        figures = pace.evaluate(lambda: {"loss": 1.0})
        if options.shared:
            plateau.step(pace.gather(figures["loss"] if figures else 0.0)[0].item())
        elif figures:
            plateau.step(figures["loss"])
    rates = pace.gather(optimizer.param_groups[0]["lr"]).tolist()
    pace.print("rates", *rates)


main()
