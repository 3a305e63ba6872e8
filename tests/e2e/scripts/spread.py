"""Trains a model whose parameters are equal at every version, evaluates; spoils a gradient if asked to."""

from __future__ import annotations

import argparse

from cases import CASES
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def apart(network: nn.Module) -> dict[str, float]:
    """How far the furthest parameter is from the first; a mixture of two versions shows."""
    first, *others = network.parameters()
    return {"apart": max(float((other - first).abs().max()) for other in others)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--bad", type=int, help="the rank whose gradients are NaN in one parameter")
    parser.add_argument("--bad-parameter", type=int, default=-1)
    options = parser.parse_args()
    pace = paceline.join()
    case = CASES["exact_in_parts"]
    model, optimizer = case.build()
    loader = DataLoader(TensorDataset(*case.samples(options.samples)), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    if pace.rank == options.bad:
        list(model.parameters())[options.bad_parameter].register_hook(
            lambda gradient: gradient * float("nan")
        )
    for _ in pace.epochs(options.epochs):
        for x, y in loader:
            case.iteration(model, optimizer, x, y)
        if pace.lead:
            pace.evaluate(apart)


main()
