"""A Wasserstein GAN: after every step of the critic its weights are clamped, as its paper does it.

`--raw` writes to `p.data` in the loop, as tutorials do; else the script registers the same function.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LARGEST = 0.01


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--raw", action="store_true")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).double()
    maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer: Any = torch.optim.SGD(critic.parameters(), lr=0.5)
    other: Any = torch.optim.SGD(maker.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(48, 3).double() + 1, torch.randn(48, 2).double())
    loader: Any = DataLoader(data, batch_size=options.batch)

    def clamp() -> None:
        for p in critic.parameters():
            p.clamp_(-LARGEST, LARGEST)

    pace = paceline.join("asp")
    if not options.raw:
        pace.after_step(clamp, optimizer)
    *_, optimizer, other, loader = pace.prepare(critic, maker, optimizer, other, loader)
    for _ in pace.epochs(options.epochs):
        for x, z in loader:
            optimizer.zero_grad()
            (critic(maker(z).detach()) - critic(x)).mean().backward()
            optimizer.step()
            if options.raw:
                for p in critic.parameters():
                    p.data.clamp_(-LARGEST, LARGEST)
            other.zero_grad()
            (-critic(maker(z))).mean().backward()
            other.step()
    pace.leave()
    if options.save is not None:
        models = {"0": critic, "1": maker}
        state = {
            f"{n}.{name}": p.detach() for n, model in models.items() for name, p in model.named_parameters()
        }
        save_file({name: p.clone() for name, p in state.items()}, f"{options.save}.{pace.rank}")


main()
