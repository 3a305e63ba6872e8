"""Optimizers that a script has written itself, as tutorials do: `--optimizer` names one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e" / "scripts"))
from pause import Pause, add_pause


class Assigning(torch.optim.Optimizer):
    """Puts new tensors in the place of weights."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class Counting(torch.optim.Optimizer):
    """Keeps the number of its steps in the group, as Adan and Prodigy do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["k"])


OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "assigning": Assigning, "counting": Counting}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--plain", help="train without Paceline, and save here")
    add_pause(parser)
    options = parser.parse_args()
    pause = Pause.asked(options, 0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), options.batch)
    if not options.plain:
        import paceline

        pace = paceline.join("asp")
        model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in range(3) if options.plain else pace.epochs(3):
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            pause()
            optimizer.step()
    if options.plain:
        save_file(model.state_dict(), options.plain)


if __name__ == "__main__":
    main()
