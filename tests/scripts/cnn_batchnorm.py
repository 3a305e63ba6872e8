"""A small convolutional network with BatchNorm that is saved in every way a script may save it."""

import copy
import io
import json
import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


def saved_bytes(thing: object) -> int:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return len(buffer.getvalue())


def sizes(model: nn.Module) -> dict[str, int]:
    """What every way of saving writes."""
    return {
        "state": saved_bytes(model.state_dict()),
        "layer": saved_bytes(model[1].state_dict()),
        "tensor": saved_bytes(model[0].weight),
        "model": saved_bytes(model),
        "pickle": len(pickle.dumps(model)),
        "safetensors": len(save(model.state_dict())),
        "copy": saved_bytes(copy.deepcopy(model).state_dict()),
    }


def main() -> None:
    pace = paceline.join()
    x, y = torch.randn(24, 1, 8, 8), torch.arange(24) % 3
    model, plain = build(), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for _ in pace.epochs(1):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()  # a copy is a copy: nobody else's weights change
    found = {"prepared": sizes(model), "plain": sizes(plain), "zero": bool(model[0].weight.eq(0).all())}
    Path(sys.argv[1], f"sizes{pace.rank}.json").write_text(json.dumps(found))


main()
