"""What the benchmark of a small cluster trains: a CNN on images with SGD, a transformer on text with AdamW,
and a perceptron on digits (for `bench peers`).

And one that has nothing to learn, where only times are looked at. All models have 1.0 MB, which is less than
DDP's first bucket holds. Accuracy is the share of right answers: of classes, or of next bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import TensorDataset

from paceline_bench.cluster import cifar, text
from paceline_bench.rivals import digits

Measure = Callable[[nn.Module], float]


class Task(NamedTuple):
    """A model, its data, and how it learns."""

    model: Callable[[int], nn.Module]
    """Made from a seed."""
    optimizer: Callable[[nn.Module, float], Optimizer]
    training: Callable[[Path], TensorDataset]
    """From a folder; text needs none."""
    loss: Callable[[nn.Module, list[Tensor]], Tensor]
    measure: Callable[[Path, int], Measure]
    """The share of right answers for so many test samples."""


def network(seed: int) -> nn.Sequential:
    """Three convolutions and a wide layer."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv2d(24, 48, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 96, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(96 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, cifar.CLASSES)),
    )
    *matrices, _ = [value for value in model.parameters() if value.dim() > 1]
    for values in model.parameters():
        nn.init.zeros_(values)
    for values in matrices:
        nn.init.kaiming_normal_(values, nonlinearity="relu")
    return model


class ByteTransformer(nn.Module):
    """Two layers that see the bytes before; the embedding is the output's too."""

    def __init__(self, width: int = 96, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(text.LENGTH, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, read: Tensor) -> Tensor:
        """Scores of the next byte, at every place."""
        hidden = self.embedding(read) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(text.LENGTH)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return F.linear(self.norm(hidden), self.embedding.weight)


class Wide(nn.Module):
    """Many weights and next to no work: for what is about times alone.

    In several layers beside each other, since a protocol that puts some tensors off has to have a choice.
    """

    def __init__(self, width: int = 250, out: int = 1000, layers: int = 10) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, out // layers) for _ in range(layers))
        self._width = width

    def forward(self, read: Tensor) -> Tensor:
        """One number per sample, repeated."""
        repeated = read.expand(-1, self._width)
        return torch.cat([layer(repeated) for layer in self.wide], dim=1)


def wide(seed: int) -> Wide:
    """The same for the same seed."""
    torch.manual_seed(seed)
    return Wide()


def transformer(seed: int) -> ByteTransformer:
    """The same for the same seed."""
    torch.manual_seed(seed)
    return ByteTransformer()


def _image_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    pixels, classes = batch
    return F.cross_entropy(model(cifar.scaled(pixels)), classes)


def _text_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    window = batch[0].long()
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def _image_measure(folder: Path, count: int) -> Measure:
    pixels, classes = cifar.test_set(folder, count)
    return lambda model: _share(model, pixels, classes)


def _text_measure(folder: Path, count: int) -> Measure:
    windows = text.test_set(count).long()
    return lambda model: _share(model, windows[:, :-1], windows[:, 1:])


def _share(model: nn.Module, given: Tensor, wanted: Tensor) -> float:
    with torch.no_grad():
        return float((model(given).argmax(-1) == wanted).float().mean())


TASKS = {
    "images": Task(
        network,
        lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
        cifar.training_set,
        _image_loss,
        _image_measure,
    ),
    "text": Task(
        transformer,
        lambda model, lr: AdamW(model.parameters(), lr=lr),
        lambda folder: TensorDataset(text.training_set()),
        _text_loss,
        _text_measure,
    ),
    "times": Task(
        wide,
        lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
        lambda folder: TensorDataset(torch.linspace(-1.0, 1.0, 256_000).unsqueeze(1)),
        lambda model, batch: model(batch[0]).square().mean(),
        lambda folder, count: lambda model: 0.0,
    ),
    "digits": Task(
        digits.network,
        lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
        digits.training_set,
        digits.loss,
        digits.measure,
    ),
}
