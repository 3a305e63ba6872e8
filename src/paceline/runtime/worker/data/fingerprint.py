"""What tells a loader's data apart: every rank has to hold the same, for a position names a sample.

A split without a seeded generator, or a draw from the system's random numbers, would give every rank data of
its own. Looked at is what costs little: indices of subsets and samplers, and some rows of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from paceline.store.work.budget import Fingerprint

ROWS = 16
"""So many rows of every tensor are looked at."""


def fingerprint(loader: DataLoader[Any]) -> Fingerprint:
    """Of what a loader gives."""
    exact, means = sha256(), list[float]()
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        exact.update(_whole_numbers(getattr(sampler, "indices", None)))
    for part in _parts(loader.dataset):
        exact.update(type(part).__name__.encode())
        if isinstance(part, Subset):
            exact.update(_whole_numbers(part.indices))
        if isinstance(part, TensorDataset):
            exact.update("".join(f"{each.dtype}{tuple(each.shape)}" for each in part.tensors).encode())
            means += (mean for each in part.tensors for mean in _means(each))
    return Fingerprint(exact.hexdigest(), tuple(means))


def _parts(data: Any) -> Iterator[Any]:
    """A dataset, and those that it is made of."""
    yield data
    within = [data.dataset] if isinstance(data, Subset) else []
    for each in data.datasets if isinstance(data, ConcatDataset) else within:
        yield from _parts(each)


def _whole_numbers(indices: Any) -> bytes:
    """Indices as bytes; nothing of what is no list of whole numbers."""
    try:
        found = np.asarray(indices.cpu() if isinstance(indices, Tensor) else indices)
    except (ValueError, TypeError, RuntimeError):
        return b""
    return found.astype(np.int64).tobytes() if found.dtype.kind in "iu" else b""


def _means(values: Tensor) -> list[float]:
    """Of the sizes of numbers, in some of the rows."""
    if not len(values) or values.layout != torch.strided or values.is_meta or values.is_quantized:
        return []
    rows = values.detach()[:: -(-len(values) // ROWS)].cpu()
    sizes = (rows.abs() if rows.is_complex() else rows.double().abs()).double()
    found: list[float] = sizes.reshape(len(rows), -1).mean(1).tolist()
    return found
