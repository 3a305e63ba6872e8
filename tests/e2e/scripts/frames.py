"""A small model that cuts its sequences, for tests: alone it trains the same model unsplit."""

from __future__ import annotations

import argparse

import torch
from pause import Pause, add_pause
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.sequence import Line, gather, parallelize, split
from paceline.parallel.sequence.spacetime import SpaceTimeLayer
from paceline.parallel.sequence.ways import made

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=16)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--time", type=int, default=5)
parser.add_argument("--space", type=int, default=7)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--way", default="dynamic")
add_pause(parser)
parser.add_argument("--fault", default="", help="what to do wrong")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if options.fault != "no line":
            self.line = Line()
        self.embed = nn.Linear(3, 8)
        self.layers = nn.ModuleList(SpaceTimeLayer(8, options.heads) for _ in range(2))
        self.head = nn.Linear(8, 2)
        self.norm = nn.BatchNorm2d(options.time) if options.fault == "batch norm" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        z = split(self.embed(x), 1, self.line)
        for layer in self.layers:
            z = made(options.way, layer, self.line)[0](z)  # type: ignore[arg-type]
        z = z.map(lambda part: self.norm(part))
        out: Tensor = self.head(gather(z).mean((1, 2)))
        return out


torch.set_num_threads(1)
pace = paceline.join("dynamic_sequence")
mesh = pace.mesh(sequence=4)
torch.manual_seed(0 if options.fault != "other weights" else pace.rank)
draw = torch.Generator().manual_seed(1)
data = TensorDataset(
    torch.randn(options.samples, options.time, options.space, 3, generator=draw, dtype=torch.float64),
    torch.randn(options.samples, 2, generator=draw, dtype=torch.float64),
)
model = Net().double()
if options.fault != "unsplit":
    model = parallelize(model, mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(data, batch_size=options.batch)
model, optimizer, loader = pace.prepare(model, optimizer, loader)


def loss_of(model: nn.Module) -> dict[str, float]:
    x, y = data.tensors
    return {"loss": (model(x) - y).square().mean().item()}


pause = Pause.asked(options, pace.rank)
for epoch in pace.epochs(options.epochs):
    for x, y in loader:
        pause()
        if options.fault == "other samples" and pace.rank == 1:
            x = x + 1
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace.report(loss=loss.item())
    figures = pace.evaluate(loss_of)
    if figures:
        pace.print(f"epoch {epoch}: {figures['loss']:.12f}")
