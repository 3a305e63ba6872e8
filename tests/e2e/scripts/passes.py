"""A tiny training whose loop takes the loader's batches in the way that --loop says."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import paceline

parser = argparse.ArgumentParser()
parser.add_argument("--loop", default="whole")
parser.add_argument("--loader", default="plain")
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--own-stop", action="store_true")
asked = parser.parse_args()


def counted(batches: Any) -> Iterator[Any]:
    """As many as the loader says it has, by next()."""
    iterator = iter(batches)
    for _ in range(len(batches)):
        batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def broken_off(batches: Any) -> Iterator[Any]:
    """Three of them."""
    for _, batch in zip(range(3), batches, strict=False):
        yield batch


class Fours(BatchSampler):
    """A batch sampler of the script's own."""


data = TensorDataset(torch.randn(asked.samples, 4), torch.randn(asked.samples, 1))
plain: Any = DataLoader(data, batch_size=4, shuffle=True, drop_last=asked.loader == "drop_last")
if asked.loader == "whole":
    plain = DataLoader(data, batch_sampler=Fours(SequentialSampler(data), 4, drop_last=False))
model = torch.nn.Linear(4, 1)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
pace = paceline.join()
model, optimizer, loader = pace.prepare(model, optimizer, plain)
ways = {"whole": iter, "unused": iter, "counted": counted, "broken off": broken_off}
for epoch in range(asked.epochs):
    number = 0
    for x, y in ways[asked.loop](loader):
        number += 1
        torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        if asked.loop == "unused" and number % 5:
            continue
        optimizer.step()
        optimizer.zero_grad()
    if asked.own_stop and epoch == 1:
        pace.stop("enough")
        break
