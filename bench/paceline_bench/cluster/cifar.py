"""CIFAR-10 as its authors give it away: binary files of records, one byte of class, then 32 x 32 pixels x 3.

The folder is the user's. Any of the five training files will do; what is missing is only not trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.errors import ConfigError

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
WHERE = "the binary version of https://www.cs.toronto.edu/~kriz/cifar.html"


class Files(NamedTuple):
    """What a folder holds."""

    training: list[Path]
    test: Path


def find(folder: Path) -> Files:
    """The files of a folder, looked at from outside only."""
    training = [folder / name for name in TRAINING if (folder / name).is_file()]
    if not training or not (folder / TEST).is_file():
        raise ConfigError(
            f"no CIFAR-10 in {folder}: it takes {TEST} and at least one of {TRAINING[0]} to "
            f"{TRAINING[-1]}, from {WHERE}."
        )
    for path in (*training, folder / TEST):
        size = path.stat().st_size
        if size == 0 or size % RECORD_BYTES:
            raise ConfigError(
                f"{path} has {size} bytes, which is no number of records of {RECORD_BYTES} bytes. "
                f"Take the files from {WHERE}."
            )
    return Files(training, folder / TEST)


def count(paths: list[Path]) -> int:
    """Images in files."""
    return sum(path.stat().st_size for path in paths) // RECORD_BYTES


def training_set(folder: Path) -> TensorDataset:
    """Bytes of images, and classes; bytes, because every worker has a copy."""
    return TensorDataset(*_read(find(folder).training))


def test_set(folder: Path, images: int) -> tuple[Tensor, Tensor]:
    """The first test images, ready for a network, and their classes."""
    pixels, classes = _read([find(folder).test])
    return scaled(pixels[:images]), classes[:images]


def scaled(pixels: Tensor) -> Tensor:
    """Bytes as numbers around 0."""
    return pixels.float().div_(255).sub_(0.47).div_(0.25)


def make_up(folder: Path, training: int, test: int, seed: int) -> None:
    """Write files of the same layout whose images are noise, brighter from class to class."""
    rng = np.random.default_rng(seed)
    for name, images in ((TRAINING[0], training), (TEST, test)):
        classes = rng.integers(0, CLASSES, (images, 1), dtype=np.uint8)
        noise = rng.integers(0, 40, (images, RECORD_BYTES - 1), dtype=np.uint8)
        (folder / name).write_bytes(np.hstack([classes, noise + 20 * classes]).tobytes())


def _read(paths: list[Path]) -> tuple[Tensor, Tensor]:
    records = np.concatenate([np.fromfile(path, dtype=np.uint8) for path in paths])
    records = records.reshape(-1, RECORD_BYTES)
    classes = torch.from_numpy(records[:, 0].astype(np.int64))
    return torch.from_numpy(records[:, 1:].reshape(-1, *SHAPE).copy()), classes
