"""Trains one of the cases. An ordinary script."""

from __future__ import annotations

import argparse

from cases import CASES
from pause import Pause, add_pause
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--load-workers", type=int, default=0)
    add_pause(parser)
    options = parser.parse_args()

    pace = paceline.join()
    case = CASES[options.case]
    model, optimizer = case.build()
    loader = DataLoader(
        TensorDataset(*case.samples(options.samples)),
        batch_size=options.batch,
        shuffle=options.shuffle,
        num_workers=options.load_workers,
    )
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    pause = Pause.asked(options, pace.rank)
    for _ in pace.epochs(options.epochs):
        for x, y in loader:
            pause()
            loss = case.iteration(model, optimizer, x, y)
            pace.report(loss=loss.item())
    pause.end()


main()
