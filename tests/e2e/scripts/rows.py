"""A small network with an ordinary loop on a mesh, for tests: alone it trains the same model unsplit."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from pause import Pause, add_pause
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.parallel.layers import parallelize

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--every", type=int, default=1, help="batches whose gradients are added up for one step")
parser.add_argument("--schedule", action="store_true")
parser.add_argument("--clip", type=float, default=0.0)
parser.add_argument("--own-clip", type=float, default=0.0, help="by torch's own function")
parser.add_argument("--raises", type=int, default=-1, help="rank whose script fails")
parser.add_argument("--at", type=int, default=5)
parser.add_argument("--when", type=Path, help="it fails once this file exists")
add_pause(parser)
parser.add_argument("--stop", type=int, default=-1, help="iteration at which the lead ends training")
parser.add_argument("--optimizer", default="SGD")
parser.add_argument("--gather", action="store_true")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--unsplit", action="store_true")
parser.add_argument("--shares", action="store_true", help="a sampler that divides the data by itself")
parser.add_argument("--drop", type=float, default=0.0)
parser.add_argument(
    "--shuffle", default="", help="by a generator of the loader's own: alike, or apart by rank"
)
options = parser.parse_args()

torch.set_num_threads(1)  # as workers have: sums over threads may differ in the last bit
pace = paceline.join()
mesh = pace.mesh(data=2, model=2)
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(options.samples, 6, generator=draw), torch.randint(0, 3, (options.samples,), generator=draw)
)
norm = [nn.BatchNorm1d(18)] if options.norm else []
model = nn.Sequential(
    nn.Linear(6, 18), *norm, nn.Tanh(), nn.Dropout(options.drop), nn.Linear(18, 17), nn.Linear(17, 3)
)
if not options.unsplit:
    model = parallelize(model, mesh)
kind = getattr(torch.optim, options.optimizer)
optimizer = kind(model.parameters(), lr=0.05, **({"momentum": 0.9} if options.optimizer == "SGD" else {}))
shuffled = torch.Generator().manual_seed(7 + (pace.rank if options.shuffle == "apart" else 0))
loader = DataLoader(
    data, options.batch, **({"shuffle": True, "generator": shuffled} if options.shuffle else {})
)
if options.shares:
    loader = DataLoader(data, options.batch, sampler=DistributedSampler(data, pace.size, pace.rank))
scheduler = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)] if options.schedule else []
model, optimizer, loader, *_ = pace.prepare(model, optimizer, loader, *scheduler)
pause = Pause.asked(options, pace.rank)
count = 0
for epoch in pace.epochs(options.epochs):
    for x, y in loader:
        count += 1
        if pace.rank == options.raises and (options.when.exists() if options.when else count == options.at):
            raise ValueError("the script is at fault")
        if pace.lead and count == options.stop:
            pace.stop("enough")
        pause()
        loss = F.cross_entropy(model(x), y) / options.every
        loss.backward()
        pace.report(loss=loss.item())
        if count % options.every:
            continue
        if options.clip:
            pace.clip_grad_norm_(options.clip)
        if options.own_clip:
            nn.utils.clip_grad_norm_(model.parameters(), options.own_clip)
        optimizer.step()
        optimizer.zero_grad()
        for each in scheduler:
            each.step()
    figures = pace.evaluate(lambda model: {"loss": F.cross_entropy(model(data[:][0]), data[:][1]).item()})
    if figures:
        pace.print(f"epoch {epoch}: {figures['loss']:.6f} after {count}")
if options.gather:
    pace.print(pace.gather(torch.full((pace.rank + 1,), pace.rank)).tolist())
