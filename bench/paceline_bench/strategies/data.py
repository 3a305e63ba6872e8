"""What is trained on: the digits of scikit-learn or CIFAR-10, ordered once per seed for all strategies."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import ConfigError
from paceline_bench.cluster import cifar
from paceline_bench.strategies.runs.models import make

HELD_BACK = 360
TESTS = 2000


class ImageData(NamedTuple):
    """Images and classes."""

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def in_order(self, samples: int, seed: int, folder: Path) -> Path:
        """A file with so many samples in the order of a seed; every epoch has an order of its own."""
        path = folder / f"samples-{samples}-{seed}.safetensors"
        if not path.exists():
            made = torch.Generator().manual_seed(seed)
            epochs = -(-samples // len(self.y))
            order = torch.cat([torch.randperm(len(self.y), generator=made) for _ in range(epochs)])[:samples]
            x = cifar.scaled(self.x[order]) if self.x.dtype is torch.uint8 else self.x[order]
            save_file({"x": x, "y": self.y[order]}, path)
        return path

    def accuracy(self, weights: Path, model: str, width: int) -> float:
        """The share of test images that saved weights name rightly."""
        _, channels, height, wide = self.test_x.shape
        network = make(model, (channels, height, wide), width, 0).eval()
        network.load_state_dict(load_file(weights))
        with torch.no_grad():
            scores = torch.cat([network(part) for part in torch.split(self.test_x, 250)])
        return float((scores.argmax(1) == self.test_y).float().mean())


def digits() -> ImageData:
    """8 x 8 pixels, ten classes, 1437 to train on."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "bench strategies trains on the digits that scikit-learn ships: pip install 'paceline[demo]', or "
            "give it CIFAR-10 with --data DIR."
        ) from None
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    return ImageData("digits", x[HELD_BACK:], y[HELD_BACK:], x[:HELD_BACK], y[:HELD_BACK])


def images(folder: Path) -> ImageData:
    """CIFAR-10, 32 x 32 pixels; accuracy on the first test images."""
    x, y = cifar.training_set(folder).tensors
    return ImageData("cifar-10", x, y, *cifar.test_set(folder, TESTS))
