"""A student, and a teacher that follows it by hand: inside the student's model, or `--beside` it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


class Pair(nn.Module):
    def __init__(self, q: nn.Module, k: nn.Module) -> None:
        super().__init__()
        self.q, self.k = q, k


def follow(q: nn.Module, k: nn.Module) -> None:
    with torch.no_grad():
        for own, its in zip(k.parameters(), q.parameters(), strict=True):
            own.mul_(0.5).add_(its, alpha=0.5)


def moved(k: nn.Module, before: list[Tensor]) -> float:
    return max(float((p - was).abs().max()) for p, was in zip(k.parameters(), before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    q, k = nn.Linear(4, 1), nn.Linear(4, 1).requires_grad_(False)
    k.load_state_dict(q.state_dict())
    before = [p.clone() for p in k.parameters()]
    optimizer: Any = torch.optim.SGD(q.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=4)
    pace = paceline.join("asp")
    models = (q, k) if options.beside else (Pair(q, k),)
    *_, optimizer, loader = pace.prepare(*models, optimizer, loader)
    for _ in pace.epochs(2):
        for x, y in loader:
            loss = (q(x) - y).square().mean() + 0.1 * (q(x) - k(x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(q, k)
    pace.report(moved=moved(k, before))
    pace.print("moved", moved(k, before))


main()
