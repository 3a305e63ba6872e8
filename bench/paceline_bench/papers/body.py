"""The body that recipes with real gradients train: a small network on the digits, or a CNN on CIFAR-10.

An ordinary loop. Rank 0 measures accuracy after every so many steps of its own, whatever the protocol.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import ConfigError
from paceline_bench.cluster import cifar
from paceline_bench.cluster.tasks import network

TESTS, HIDDEN = 497, 64
"""Of the 1,797 digits so many are for tests; 1,300 are left to train on."""
FALLS = (2 / 3, 5 / 6)
"""Shares of the work after which the learning rate falls to a tenth, where it falls."""

Prepared = Callable[[Tensor], Tensor]


class Data(NamedTuple):
    """What is trained on, and what is tested with."""

    training: TensorDataset
    tests: Tensor
    answers: Tensor
    prepared: Prepared
    """Makes of a batch what the network takes."""


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What all are told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="CIFAR-10; without it, the digits.")
    parser.add_argument("--digits", type=Path, help="The same, read before; reading takes a while.")
    parser.add_argument("--images", type=int, default=20_000, help="at most so many to train on")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation, of pixels from 0 to 1")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--falls", action="store_true")
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args(words)


def read_digits() -> tuple[Tensor, Tensor]:
    """The digits of scikit-learn: rows of 64 pixels from 0 to 1, and classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "these recipes train on the digits of scikit-learn, which is missing. "
            "pip install 'paceline[demo]', or give --data DIR with CIFAR-10."
        ) from None
    images, classes = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(classes)


def digits(told: argparse.Namespace) -> Data:
    """Shuffled, with noise that is always the same."""
    if told.digits is None:
        images, classes = read_digits()
    else:
        kept = load_file(told.digits)
        images, classes = kept["images"], kept["classes"]
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(len(classes), generator=draw)
    x, y = images[order], classes[order]
    x += told.noise * torch.randn(x.shape, generator=draw)
    x, tests, y, answers = x[TESTS:], x[:TESTS], y[TESTS:], y[:TESTS]
    return Data(TensorDataset(x[: told.images], y[: told.images]), tests, answers, lambda pixels: pixels)


def pictures(folder: Path, images: int) -> Data:
    """The first images of CIFAR-10."""
    pixels, classes = cifar.training_set(folder).tensors
    training = TensorDataset(pixels[:images], classes[:images])
    return Data(training, *cifar.test_set(folder, 1000), cifar.scaled)


def small(seed: int) -> nn.Module:
    """One hidden layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def optimizer_of(told: argparse.Namespace, model: nn.Module) -> Optimizer:
    """As the recipe wants."""
    if told.adamw:
        return AdamW(model.parameters(), lr=told.lr)
    return SGD(model.parameters(), lr=told.lr, momentum=told.momentum)


def train(pace: Any, told: argparse.Namespace) -> None:
    """The body."""
    torch.set_num_threads(1)
    data = digits(told) if told.data is None else pictures(told.data, told.images)
    model = small(told.seed) if told.data is None else network(told.seed)
    optimizer = optimizer_of(told, model)
    loader = DataLoader(data.training, batch_size=told.batch, shuffle=True, drop_last=True)
    rounds = told.epochs * len(loader) / pace.size
    scheduler = LambdaLR(optimizer, lambda done: left_of_rate(done / rounds) if told.falls else 1.0)
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
    step = 0
    for _ in pace.epochs(told.epochs):
        for pixels, classes in loader:
            F.cross_entropy(model(data.prepared(pixels)), classes).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            if step % told.every == 0:
                pace.evaluate(lambda model: measured(model, data))


def left_of_rate(share: float) -> float:
    """After so much of the work."""
    return float(0.1 ** sum(share >= fall for fall in FALLS))


def measured(model: nn.Module, data: Data) -> dict[str, float]:
    """The share of right answers."""
    right = (model(data.tests).argmax(-1) == data.answers).float().mean()
    return {"accuracy": right.item()}


if __name__ == "__main__":
    train(paceline.join(), options())
