"""A small pipeline on made-up data, for tests: alone it trains the same model unsplit."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from pause import Pause, add_pause
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.pipeline import pipeline

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--schedule", action="store_true")
parser.add_argument("--norm", action="store_true")
parser.add_argument("--die", type=int, default=-1, help="rank that kills itself")
parser.add_argument("--raises", type=int, default=-1, help="rank whose script fails")
parser.add_argument("--at", type=int, default=5)
add_pause(parser)
parser.add_argument("--stop", type=int, default=-1, help="iteration at which the lead ends training")
parser.add_argument("--fault", default="", help="what to do wrong")
parser.add_argument("--optimizer", default="SGD")
parser.add_argument(
    "--shuffle", default="", help="by a generator of the loader's own: alike, or apart by rank"
)
options = parser.parse_args()


def network() -> nn.Sequential:
    rows: list[nn.Module] = []
    for _ in range(3):
        rows += [nn.Sequential(nn.Linear(6, 6), *([nn.BatchNorm1d(6)] if options.norm else []), nn.Tanh())]
    rows.append(nn.Linear(6, 3))
    if options.fault == "shared":
        rows[0][0].weight = rows[2][0].weight  # type: ignore[index]
    if options.fault == "twice":
        rows = [nn.Linear(6, 6), tanh := nn.Tanh(), nn.Linear(6, 6), tanh, nn.Linear(6, 3)]
    if options.fault == "again":
        rows[2] = rows[0]
    if options.fault == "tuple":
        rows[1] = nn.LSTM(6, 6)
    if options.fault == "forward":
        return Tripled(*rows)
    whole = nn.Sequential(*rows)
    if options.fault == "hooks":
        whole.register_forward_hook(lambda module, x, out: out * 3.0)
    if options.fault == "tensors":
        whole.register_buffer("mean", torch.zeros(3))
    if options.fault == "unfrozen":
        rows[0].requires_grad_(False)
    return whole


class Tripled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 3.0)


torch.set_num_threads(1)  # as stages have: sums over threads may differ in the last bit
pace = paceline.join("bp")
mesh = pace.mesh(stage=4)
torch.manual_seed(0)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(options.samples, 6, generator=draw), torch.randint(0, 3, (options.samples,), generator=draw)
)
model = network()
kind = getattr(torch.optim, options.optimizer)
beside = [nn.Parameter(torch.ones(7))] if options.fault == "beside" else []
optimizer = kind(
    [*model.parameters(), *beside], lr=0.05, **({"momentum": 0.9} if options.optimizer == "SGD" else {})
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) if options.schedule else None
shuffled = torch.Generator().manual_seed(7 + (pace.rank if options.shuffle == "apart" else 0))
loader = DataLoader(
    data, options.batch, **({"shuffle": True, "generator": shuffled} if options.shuffle else {})
)
pipe, loader = pipeline(
    pace,
    mesh,
    model,
    optimizer,
    loader,
    loss=F.cross_entropy,
    scheduler=scheduler,
    cuts=None if options.fault == "measured" else {1: (), 2: (2,), 4: (1, 2, 3)}.get(mesh.size("stage")),
)
pause = Pause.asked(options, pace.rank)
if options.fault == "late":
    torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
count = 0
for epoch in pace.epochs(options.epochs):
    for x, y in loader:
        count += 1
        if pace.rank == options.die and count == options.at:
            Path("died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        if pace.rank == options.raises and count == options.at:
            raise ValueError("the script is at fault")
        if pace.lead and count == options.stop:
            pace.stop("enough")
        if options.fault == "torn" and pace.rank == 1:
            raise RuntimeError("gloo lost its way")
        if options.fault == "whole":
            model(torch.zeros(4, 6))
        pause()
        if options.fault == "unfrozen":
            model[0].requires_grad_(True)
        pipe.step(x, y)
        if scheduler is not None:
            scheduler.step()
    figures = pace.evaluate(lambda model: {"loss": F.cross_entropy(model(data[:][0]), data[:][1]).item()})
    if figures:
        pace.print(f"epoch {epoch}: {figures['loss']:.6f} after {count}")
if options.fault == "rates" and mesh.index("stage") == 0:
    print(optimizer.param_groups[0]["lr"], flush=True)
