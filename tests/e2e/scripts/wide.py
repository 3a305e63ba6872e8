"""A network whose weights do not fit a budget of memory that every worker has, for tests."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.layers.splitting import parallelize  # with all it imports, before memory is counted

BUDGET, WIDTH, DEPTH = int(sys.argv[1]) << 20, 1024, 24


def data_bytes() -> int:
    """What this process has of its own by now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


torch.set_num_threads(1)
pace = paceline.join("row_split")
mesh = pace.mesh(model=4)
with torch.device("meta"):
    rows = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*rows, nn.Linear(WIDTH, 2))
weights = sum(p.numel() * p.element_size() for p in model.parameters())
loader = DataLoader(TensorDataset(torch.randn(16, WIDTH), torch.randint(0, 2, (16,))), batch_size=4)
allowed = data_bytes() + BUDGET
resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
pace.print(f"weights {weights}, budget {BUDGET}")
model = parallelize(model, mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
pace.print(f"own {sum(p.numel() * p.element_size() for p in model.parameters())}")
