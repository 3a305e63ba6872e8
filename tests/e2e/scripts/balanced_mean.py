"""The gradient of a batch is the mean of its samples, which are whole numbers."""

from __future__ import annotations

from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline

pace = paceline.join()
case = CASES["exact"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(400)), batch_size=10)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(2):
    for x, _ in loader:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
