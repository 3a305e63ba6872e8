"""A mixed-precision loop with a GradScaler; one sample makes the gradient of a scaled loss overflow."""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

SAMPLES, HUGE = 32, 13


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--unscale", action="store_true")
    args = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(SAMPLES, 6)
    y = x[:, :1] * 2 - x[:, 1:2]
    x[HUGE], y[HUGE] = 1e19, 1e19
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=args.fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    loader = DataLoader(TensorDataset(x, y), batch_size=args.batch)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                outputs = model(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            scaler.scale(loss).backward()
            if args.unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    pace.leave()
    save_file(model.state_dict(), args.folder / f"rank{pace.rank}.safetensors")
    (args.folder / f"rank{pace.rank}.json").write_text(json.dumps(scaler.get_scale()))


main()
