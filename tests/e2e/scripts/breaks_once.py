"""Trains; rank 1 breaks at its tenth iteration, the first time it is started."""

from __future__ import annotations

import os

from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    pace = paceline.join("ssp")
    case = CASES["momentum"]
    model, optimizer = case.build()
    loader = DataLoader(TensorDataset(*case.samples(240)), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    done = 0
    for _ in pace.epochs(3):
        for x, y in loader:
            case.iteration(model, optimizer, x, y)
            done += 1
            if first and pace.rank == 1 and done == 10:
                raise RuntimeError("broken on purpose")


main()
