"""An MLP under a budget of memory that the kernel enforces, for the benchmark of split layers.

The budget is for what a worker has of its own after its imports: weights, gradients, activations, messages.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.decoding import decode_json
from paceline.parallel.layers.costs import LayerFigures
from paceline.parallel.layers.splitting import RowShare, parallelize

MARK = "figures "


class Size(msgspec.Struct, frozen=True):
    """Of the model, its batches, and the memory that a worker may take."""

    width: int
    depth: int
    batch: int
    batches: int
    budget_mb: int

    @property
    def weight_bytes(self) -> int:
        """Of all layers."""
        return 4 * (self.depth * self.width * (self.width + 1) + 2 * (self.width + 1))


class WorkerFigures(msgspec.Struct, frozen=True):
    """What one worker says at its end."""

    model: LayerFigures
    measured: LayerFigures


def blocks(size: Size) -> nn.Sequential:
    """Equal layers, and a small one at the end; without memory until it is given weights."""
    with torch.device("meta"):
        rows = [part for _ in range(size.depth) for part in (nn.Linear(size.width, size.width), nn.Tanh())]
        return nn.Sequential(*rows, nn.Linear(size.width, 2))


def limit(budget_mb: int) -> None:
    """From here on the kernel gives this process so much more, and no more."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
    allowed = now + (budget_mb << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


def main() -> None:
    """Train, and say what it took."""
    size = decode_json(sys.argv[1], kind=Size)
    torch.set_num_threads(1)
    pace = paceline.join("row_split")
    mesh = pace.mesh(model=4)
    samples = size.batch * size.batches
    data = TensorDataset(torch.randn(samples, size.width), torch.randint(0, 2, (samples,)))
    loader = DataLoader(data, batch_size=size.batch)
    limit(size.budget_mb)
    model = parallelize(blocks(size), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for x, y in loader:
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    share = getattr(mesh, "shares", {}).get("model")
    if isinstance(share, RowShare):
        seen = WorkerFigures(share.costs.predicted, share.costs.measured)
        print(f"{MARK}{msgspec.json.encode(seen).decode()}", flush=True)


if __name__ == "__main__":
    main()
