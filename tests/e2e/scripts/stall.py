"""One batch for each of four workers; all but the last never come to their push."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline

pace = paceline.join()
case = CASES["momentum"]
model, optimizer = case.build()
loader = DataLoader(TensorDataset(*case.samples(16)), batch_size=4)
model, optimizer, loader = pace.prepare(model, optimizer, loader)
for _ in pace.epochs(1):
    for x, y in loader:
        if pace.rank < 3:
            Path(sys.argv[1], f"stalled{pace.rank}").touch()
            time.sleep(600)
        case.iteration(model, optimizer, x, y)
