"""Ordinary scripts with an unusual turn each, as strangers write them: `--case` names it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline

SAMPLES = 96


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (SAMPLES,), generator=generator)
    centres = torch.randn(3, 6, generator=generator) * 2
    return centres[labels] + torch.randn(SAMPLES, 6, generator=generator), labels


class Halving(DataLoader[Any]):
    """A loader that changes what it gives."""

    def __iter__(self) -> Any:
        return ((x / 2, y) for x, y in super().__iter__())


class RankAware(IterableDataset[Any]):
    """A stream that divides itself, as those written for torchrun do."""

    def __iter__(self) -> Iterator[Any]:
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        return iter(list(zip(*data(), strict=True))[rank::size])


class Uneven(IterableDataset[Any]):
    """A stream whose batches do not divide among workers: an odd number of them, the last one short."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*data(), strict=True))[:-12])


class Ordered(torch.utils.data.Sampler[int]):
    """A sampler that is told the epoch."""

    epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Counting(nn.Module):
    """Its buffer is another tensor after every pass, as running means are that are written in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + len(x)
        return torch.tanh(x)


def loader_for(case: str, batch: int) -> DataLoader[Any]:
    samples = TensorDataset(*data())
    if case == "stream":
        return DataLoader(RankAware(), batch_size=batch)
    if case == "uneven stream":
        return DataLoader(Uneven(), batch_size=batch)
    if case == "sampler":
        return DataLoader(samples, batch_size=batch, sampler=Ordered())
    if case == "whole":
        x, y = data()
        return DataLoader(list(zip(x.split(batch), y.split(batch), strict=True)), batch_size=None)  # type: ignore[arg-type]
    if case == "islice ahead":
        return DataLoader(samples, batch_size=batch, num_workers=1)
    return (Halving if case == "loader" else DataLoader)(samples, batch_size=batch)


def taken(case: str, loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a pass; some loops take as many as there are, and do not ask for the end."""
    batches = iter(loader)
    if case == "next":
        return (next(batches) for _ in range(len(loader)))
    return islice(batches, len(loader)) if "islice" in case else batches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()
    case = options.case
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model = nn.Sequential(nn.Linear(6, 8), Counting() if case == "buffer" else nn.Tanh(), nn.Linear(8, 3))
    if case == "complex":
        model.register_parameter("phase", nn.Parameter(torch.ones(3, dtype=torch.complex128)))
    if case == "two losses":
        model.register_parameter("extra", nn.Parameter(torch.ones(3)))
    if case == "converted":
        model = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3))
    if case == "lazy":
        model[0] = nn.LazyLinear(8)
    decay = 0.5 if case == "two losses" else 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.5, weight_decay=decay)
    loader = loader_for(case, options.batch)
    pace = paceline.join("bsp")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1 if case == "schedule" else 10**6)
    model, optimizer, prepared = pace.prepare(model, optimizer, loader)
    loader = loader if case == "ignored" else prepared
    if case == "converted":
        model.to(memory_format=torch.channels_last)
    for epoch in pace.epochs(2):
        if case == "sampler":
            loader.sampler.set_epoch(epoch)
        if case == "optimizer" and epoch == 1:
            optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
        if case == "rebuilt" and epoch == 1:
            loader = loader_for(case, 2)  # of 48 batches
        for number, (x, y) in enumerate(taken(case, loader)):
            if case == "break" and number == 2:
                break
            if case != "never cleared":
                optimizer.zero_grad()
            loss = F.cross_entropy(model(x.double()), y)
            loss.backward()
            if case == "two losses":  # the second says nothing about `extra`, so far
                (model(x.double()).mean() + 0.0 * model.extra.sum()).backward()
            before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            for _ in range(5 if case == "often" else 0):
                optimizer.step()
            scheduler.step()
            if case == "data":  # the usual way to bound weights
                model[2].weight.data = model[2].weight.data.clamp(-0.1, 0.1)
            if case == "group" and epoch == 1 and not number:
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            moved = [
                float((p.grad - was).abs().max())
                for p, was in zip(model.parameters(), before, strict=True)
                if p.grad is not None
            ]
            pace.report(loss=loss.item(), moved=max(moved))


main()
