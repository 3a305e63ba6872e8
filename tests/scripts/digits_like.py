"""A plain classification loop that saves its model, its optimizer and the whole state by itself."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stay", action="store_true", help="do not leave before the model is saved")
    parser.add_argument("--load", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    x = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=5)
    first = pace.load(args.load)["epoch"] if args.load else 0
    model, optimizer, scheduler, loader = pace.prepare(model, optimizer, scheduler, loader)
    for epoch in range(int(first), args.epochs):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
        pace.save(args.folder / f"saved{epoch}", epoch=epoch + 1)
    torch.save(optimizer.state_dict(), args.folder / f"optimizer{pace.rank}.pt")
    if not args.stay:
        pace.leave()
    save_file(model.state_dict(), args.folder / f"model{pace.rank}.safetensors")


main()
