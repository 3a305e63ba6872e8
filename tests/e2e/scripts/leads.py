"""Trains and evaluates after every epoch, by whoever leads; ranks die or leave where a test wants it."""

from __future__ import annotations

import argparse
import os
import signal
from functools import partial

from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline


def die() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=["all", "lead", "first"], help="who calls pace.evaluate")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--dies", type=int, action="append", nargs=2, default=[], metavar=("RANK", "EPOCH"))
    parser.add_argument("--falls", type=int, help="the epoch in whose evaluation rank 0 dies")
    parser.add_argument("--leaves", type=int, action="append", nargs=2, default=[], metavar=("RANK", "EPOCH"))
    options = parser.parse_args()
    dies, leaves = dict(options.dies), dict(options.leaves)

    pace = paceline.join()
    case = CASES["momentum"]
    model, optimizer = case.build()
    x, y = case.samples(60)
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(options.epochs):
        for a, b in loader:
            case.iteration(model, optimizer, a, b)
            if epoch == dies.get(pace.rank):
                die()
        if epoch == dies.get(pace.rank):  # the others were faster, and have left it nothing
            die()
        if {"all": True, "lead": pace.lead, "first": pace.rank == 0}[options.how]:
            falls = pace.rank == 0 and epoch == options.falls
            figures = pace.evaluate(die if falls else partial(float, 0.1 * (epoch + 1)))
            pace.print(f"epoch {epoch}: rank {pace.rank} has {figures}")
        if epoch == leaves.get(pace.rank):
            return


main()
