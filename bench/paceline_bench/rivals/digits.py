"""scikit-learn's digits as a task, kept in one file: no rival's interpreter needs scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import ConfigError

FILE = "digits.safetensors"
HELD_OUT = 5
"""One image of so many is for testing."""
TRAINING = 1408
"""Of the others, the first so many: whole rounds of 2 or 4 workers with batches of 16: all do the same."""
WIDTH = 472
"""Of two layers: 1.03 MB in all, a little less than DDP's first bucket holds."""


def write(folder: Path) -> None:
    """All images, in an order that is always the same: in the data, writers come one after another."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "bench peers trains on scikit-learn's digits, and scikit-learn is not installed: "
            "pip install 'paceline[demo]', or name a folder with CIFAR-10 (--data)."
        ) from None
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32) / 16
    save_file(
        {"images": images[order], "classes": torch.tensor(classes, dtype=torch.int64)[order]}, folder / FILE
    )


def training_set(folder: Path) -> TensorDataset:
    """Four images of five, less what is no whole round."""
    images, classes = _read(folder)
    chosen = torch.arange(len(classes)) % HELD_OUT != 0
    return TensorDataset(images[chosen][:TRAINING], classes[chosen][:TRAINING])


def measure(folder: Path, count: int) -> Callable[[nn.Module], float]:
    """The share of right answers for the others, or the first of them."""
    images, classes = _read(folder)
    shown, wanted = images[::HELD_OUT][:count], classes[::HELD_OUT][:count]

    def share(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(shown).argmax(-1) == wanted).float().mean())

    return share


def network(seed: int) -> nn.Sequential:
    """A perceptron with two hidden layers."""
    torch.manual_seed(seed)
    layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Cross-entropy."""
    images, classes = batch
    return F.cross_entropy(model(images), classes)


def _read(folder: Path) -> tuple[Tensor, Tensor]:
    held = load_file(folder / FILE)
    return held["images"], held["classes"]
