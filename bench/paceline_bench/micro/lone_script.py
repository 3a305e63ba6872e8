"""A small CNN on made-up digits: the script that `lone` and `trace` run, plain and under Paceline.

    python lone_script.py --plain --width 16 --steps 200
    paceline train lone_script.py --workers 1 -- --width 16 --steps 200

It prints the seconds its loop took and nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = 4096


class LoneTraining:
    """Model, optimizer and loader, and a loop over them that anybody would write."""

    def __init__(self, width: int, batch: int, seed: int) -> None:
        torch.manual_seed(seed)
        images, labels = torch.rand(SAMPLES, 1, 8, 8), torch.randint(10, (SAMPLES,))
        self.model: nn.Module = _network(width)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9
        )
        self.loader: Any = DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True)
        self.losses: list[float] = []
        self.report: Callable[[float], None] = self.losses.append

    def prepare(self, pace: Any) -> None:
        """Have Paceline look after it."""
        self.model, self.optimizer, self.loader = pace.prepare(self.model, self.optimizer, self.loader)
        self.report = lambda loss: pace.report(loss=loss)

    def train(self, steps: int) -> float:
        """So many steps; the seconds they took."""
        began = time.perf_counter()
        while steps > 0:
            for x, y in islice(self.loader, steps):
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.report(loss.item())
                steps -= 1
        return time.perf_counter() - began


def _network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * width, 10),
    )


def main() -> None:
    """Train alone or under Paceline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    pace = None
    if not options.plain:
        import paceline

        pace = paceline.join("bsp")
    training = LoneTraining(options.width, options.batch, seed=0)
    if pace is not None:
        training.prepare(pace)
    training.train(options.steps // 10)
    print(training.train(options.steps), flush=True)


if __name__ == "__main__":
    main()
