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
pause = Pause(*sys.argv[3:4] or [None], 4)
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
if how == "iteration":
    model, optimizer, loader, scheduler = pace.prepare(model, optimizer, loader, scheduler)
else:
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(epochs):
    for x, y in loader:
        pause()
        pace.report(lr=optimizer.param_groups[0]["lr"])
        case.iteration(model, optimizer, x, y)
        if how == "iteration":
            scheduler.step()
    if how == "epoch":
        scheduler.step()
