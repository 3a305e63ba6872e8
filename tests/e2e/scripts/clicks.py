"""A small model with embedding tables on a mesh, for tests: alone it trains the same model unsplit."""

from __future__ import annotations

import argparse

import torch
from pause import Pause, add_pause
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.embedding import EmbeddingTables, RowWiseAdagrad, Table

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=48)
parser.add_argument("--batch", type=int, default=3)
parser.add_argument("--sharding", default="auto")
parser.add_argument("--optimizer", default="sgd")
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--budget", type=int, default=None)
add_pause(parser)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--fault", default="")
options = parser.parse_args()

torch.set_num_threads(1)
pace = paceline.join()
mesh = pace.mesh(data=2, shard=2)
torch.manual_seed(pace.rank if options.fault == "seeds" else 0)
draw = torch.Generator().manual_seed(1)
count = options.samples
data = TensorDataset(
    torch.randint(0, 19, (count,), generator=draw),
    torch.randint(0, 11, (count, 3), generator=draw),
    torch.randn(count, 1, generator=draw),
)
if options.fault == "ids":
    data.tensors[0][20] = 19
tables = EmbeddingTables(
    mesh,
    [
        Table("a", 19, 4, sharding=options.sharding),
        Table("b", 11, 4, pooling="mean", sharding=options.sharding),
    ],
    every=options.every,
    budget_bytes=options.budget,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables, self.top = tables, nn.Linear(8, 1)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        found = self.tables({"a": a, "b": b})
        return self.top(torch.cat([found["a"], found["b"]], 1))


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
kinds = {
    "sgd": lambda: torch.optim.SGD(tables.weights, lr=options.lr),
    "adagrad": lambda: RowWiseAdagrad(tables.weights, lr=options.lr),
    "Adam": lambda: torch.optim.Adam(tables.weights, lr=options.lr),
}
rows = kinds[options.optimizer]()
if options.fault != "untrained":
    tables.trained_by(rows)
loader = DataLoader(data, batch_size=options.batch)
model, optimizer, loader = pace.prepare(model, optimizer, loader)


def measure(model: nn.Module) -> dict[str, float]:
    a, b, y = data.tensors
    return {"loss": (model(a.clamp(max=18), b) - y).square().mean().item()}


pause = Pause.asked(options, pace.rank)
for epoch in pace.epochs(options.epochs):
    for a, b, y in loader:
        pause()
        (model(a, b) - y).square().mean().backward()
        optimizer.step()
        if options.fault != "unstepped":
            rows.step()
        optimizer.zero_grad()
        rows.zero_grad()
    figures = pace.evaluate(measure)
    if figures:
        pace.print(f"epoch {epoch}: {figures['loss']:.6f}")
