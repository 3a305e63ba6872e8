"""What the benchmark of a small cluster trains: a CNN of 1 MB on CIFAR-10, until somebody stops it.

The same body runs under `paceline train` and, with another pace, under DistributedDataParallel. The
lead never evaluates: it keeps copies of the weights for somebody else to measure, at the same counts of
samples under every protocol, so that measuring takes nobody's time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline
from paceline.bench.cluster.cifar import CLASSES, scaled, training_set

EPOCHS = 10_000
"""More than anybody waits for."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What both sides are told, word for word the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--copies", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args(words)


def network(seed: int) -> nn.Sequential:
    """Three convolutions and a wide layer: 1.0 MB, which is less than DDP's first bucket holds."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 96, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, CLASSES)),
    )
    *matrices, _ = [value for value in model.parameters() if value.dim() > 1]
    for values in model.parameters():
        nn.init.zeros_(values)
    for values in matrices:
        nn.init.kaiming_normal_(values, nonlinearity="relu")
    return model


def train(pace: Any, told: argparse.Namespace) -> None:
    """The body: an ordinary loop."""
    torch.set_num_threads(1)
    model = network(told.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=told.lr, momentum=0.9)
    round_ = told.batch * pace.size
    scheduler = LambdaLR(optimizer, lambda rounds: min(1.0, (rounds + 1) * round_ / told.warmup))
    loader = DataLoader(training_set(told.data), batch_size=told.batch, shuffle=True, drop_last=True)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    keep, due = keeper(told.copies), told.every
    for _ in pace.epochs(EPOCHS):
        for pixels, classes in loader:
            F.cross_entropy(model(scaled(pixels)), classes).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            samples = scheduler.last_epoch * round_
            if samples >= due:
                pace.evaluate(keep)
                due = samples - samples % told.every + told.every


def keeper(folder: Path) -> Callable[[nn.Module], dict[str, float]]:
    """Keeps copies of a model, numbered; what is there under its name is complete."""
    number = 0

    def keep(model: nn.Module) -> dict[str, float]:
        nonlocal number
        number += 1
        unfinished = folder / "unfinished"
        save_file({name: value.clone() for name, value in model.state_dict().items()}, unfinished)
        unfinished.rename(copy_of(folder, number))
        return {"copy": number}

    return keep


def copy_of(folder: Path, number: int) -> Path:
    """Where the copy with this number is."""
    return folder / f"{number}.safetensors"


if __name__ == "__main__":
    train(paceline.join(), options())
