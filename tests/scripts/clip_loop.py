"""A loop that clips gradients: by pace.clip_grad_norm_, or with --own by torch's function."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

NORM = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1.0)
    loader = DataLoader(TensorDataset(x, x.prod(1, keepdim=True)), batch_size=args.batch)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            if args.own:
                nn.utils.clip_grad_norm_(model.parameters(), NORM)
            else:
                pace.clip_grad_norm_(NORM)
            optimizer.step()
    if args.save:
        save_file(model.state_dict(), args.save)


main()
