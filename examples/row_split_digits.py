"""Train wide layers on the digits set, split by their outputs: `paceline train --mesh model=2`, or alone."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import paceline
from digits import digits
from paceline.parallel.layers import parallelize


def network() -> nn.Sequential:
    """Convolutions and wide linear layers; the ten scores at the end are too few to be split."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Flatten(),
        nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        nn.Linear(256, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()

    pace = paceline.join("row_split")
    mesh = pace.mesh(model=2)
    torch.manual_seed(0)
    train, test_x, test_y = digits()
    model = parallelize(network(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)

    def accuracy(model: nn.Module) -> dict[str, float]:
        scores = model(test_x)
        right = (scores.argmax(1) == test_y).float().mean()
        return {"accuracy": right.item(), "loss": F.cross_entropy(scores, test_y).item()}

    for epoch in pace.epochs(options.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            pace.report(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()
        figures = pace.evaluate(accuracy)
        if figures:
            pace.print(f"epoch {epoch + 1}: accuracy {figures['accuracy']:.3f}, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    main()
