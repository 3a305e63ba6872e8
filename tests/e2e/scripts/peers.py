"""Trains one of the cases and evaluates after every epoch; prints what the evaluated model was."""

from __future__ import annotations

import argparse

import torch
from cases import CASES
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--evaluate", choices=["all", "lead", "none"], default="all")
    parser.add_argument("--protocol")
    parser.add_argument("--period", type=int)
    parser.add_argument("--bad", type=int, default=-1, help="the rank whose third gradient is not a number")
    parser.add_argument("--unprepared", action="store_true", help="leave the loader out of prepare")
    options = parser.parse_args()

    settings = {} if options.period is None else {"period": options.period}
    pace = paceline.join(options.protocol, **settings)
    case = CASES[options.case]
    model, optimizer = case.build()
    loader = DataLoader(TensorDataset(*case.samples(48)), batch_size=4)
    if options.unprepared:
        model, optimizer = pace.prepare(model, optimizer)
    else:
        model, optimizer, loader = pace.prepare(model, optimizer, loader)

    def total(network: torch.nn.Module) -> dict[str, float]:
        assert not network.training
        return {"accuracy": 0.5, "total": sum(float(p.double().sum()) for p in network.parameters())}

    done = 0
    for _ in pace.epochs(3):
        for x, y in loader:
            done += 1
            if pace.rank == options.bad and done == 3:
                x = x * float("nan")
            case.iteration(model, optimizer, x, y)
        if options.evaluate == "all" or (options.evaluate == "lead" and pace.lead):
            before = [p.detach().clone() for p in model.parameters()]
            pace.evaluate(total)
            assert model.training
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


main()
