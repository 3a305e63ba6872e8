"""Trains with a learning rate that falls by a tenth each time its scheduler is stepped."""

from __future__ import annotations

import sys

import torch
from cases import CASES
from pause import Pause
from torch.utils.data import DataLoader, TensorDataset

import paceline

pace = paceline.join()
how, epochs = sys.argv[1], int(sys.argv[2])
pause = Pause(*sys.argv[3:4] or [None], int(sys.argv[4]) if sys.argv[4:] else 4)
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)


def fall() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


scheduler = fall()
if how in ("epoch", "phases"):
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
else:
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
count = 0
for epoch in pace.epochs(epochs):
    if how == "phases" and epoch == 1:
        scheduler = pace.prepare(fall())
    for x, y in loader:
        pause()
        pace.report(lr=optimizer.param_groups[0]["lr"])
        case.iteration(model, optimizer, x, y)
        count += 1
        if how == "iteration" or (how == "phases" and epoch) or (how == "every" and count % 3 == 0):
            scheduler.step()
        if how == "argument":
            scheduler.step(count / 12)
    if "epoch" in how:
        scheduler.step()
