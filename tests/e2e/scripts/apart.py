"""Trains a case and asks how far apart the replicas are: from the ranks named, after every epoch."""

from __future__ import annotations

import argparse

import torch
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--ask", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--early", action="store_true", help="ask before prepare")
    parser.add_argument("--late", action="store_true", help="ask after leave")
    parser.add_argument("--evaluate", action="store_true", help="the lead evaluates as well")
    options = parser.parse_args()

    pace = paceline.join()
    case = CASES[options.case]
    model, optimizer = case.build()
    loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)
    if options.early:
        pace.consensus()
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for x, y in loader:
            case.iteration(model, optimizer, x, y)
        if options.evaluate:
            pace.evaluate(lambda network: 0.5)
        if pace.rank in options.ask:
            before = [p.detach().clone() for p in model.parameters()]
            print(f"rank {pace.rank} {pace.consensus()!r}", flush=True)
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    if options.late:
        pace.leave()
        pace.consensus()


main()
