"""Adds up whole numbers from a loader of the kind named on the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from cases import CASES
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import paceline

SAMPLES, BATCH, EPOCHS = 60, 4, 3


class Stream(IterableDataset[Any]):
    """Has no length and no positions."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return zip(self.x, self.y, strict=True)


class Shuffled(Sampler[list[int]]):
    """Whole batches, shuffled by NumPy."""

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(SAMPLES).tolist()
        return (order[i : i + BATCH] for i in range(0, SAMPLES, BATCH))


class Liar(Sampler[int]):
    """Gives fewer than it says."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 20))


class RoundsDown(Sampler[list[int]]):
    """Batches of 7: its length leaves out the last, short one, which it gives all the same."""

    def __len__(self) -> int:
        return SAMPLES // 7

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(i, min(i + 7, SAMPLES))) for i in range(0, SAMPLES, 7))


class Named(Dataset[Any]):
    """Samples that are dictionaries."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


def make(kind: str, x: Tensor, y: Tensor) -> DataLoader[Any]:
    data = TensorDataset(x, y)
    match kind:
        case "processes":
            return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=2)
        case "persistent":
            return DataLoader(data, batch_size=BATCH, num_workers=1, persistent_workers=True)
        case "weighted":
            return DataLoader(data, BATCH, sampler=WeightedRandomSampler(range(1, SAMPLES + 1), SAMPLES))
        case "generator":
            return DataLoader(data, BATCH, shuffle=True, generator=torch.Generator().manual_seed(3))
        case "batches":
            return DataLoader(data, batch_sampler=Shuffled())
        case "drop_last":
            return DataLoader(data, batch_size=7, drop_last=True)
        case "stream":
            return DataLoader(Stream(x, y), batch_size=BATCH)
        case "dictionary":
            return DataLoader(Named(x, y), batch_size=BATCH)
        case "liar":
            return DataLoader(data, BATCH, sampler=Liar())
        case "rounds_down":
            return DataLoader(data, batch_sampler=RoundsDown())
        case "distributed":
            return DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=0))
        case _:
            return DataLoader(data, batch_size=BATCH)


def main() -> None:
    pace = paceline.join()
    case = CASES["exact"]
    model, optimizer = case.build()
    loader = make(sys.argv[1], *case.samples(SAMPLES))
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(EPOCHS):
        for batch in loader:
            x, y = batch.values() if isinstance(batch, dict) else batch
            case.iteration(model, optimizer, x, y)


main()
