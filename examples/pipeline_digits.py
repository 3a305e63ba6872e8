"""Train a deeper network on the digits set, cut into stages: `paceline train --mesh stage=4`, or alone."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import paceline
from digits import digits
from paceline.parallel.pipeline import pipeline


def network() -> nn.Sequential:
    """Eight blocks in a row; a pipeline cuts between them."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        nn.Flatten(),
        nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()

    pace = paceline.join("layerwise")
    mesh = pace.mesh(stage=4)
    torch.manual_seed(0)
    train, test_x, test_y = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)
    pipe, loader = pipeline(
        pace,
        mesh,
        model,
        optimizer,
        loader,
        loss=F.cross_entropy,
        cuts=(2, 4, 6) if mesh.size("stage") == 4 else None,
    )

    def accuracy(model: nn.Module) -> dict[str, float]:
        scores = model(test_x)
        right = (scores.argmax(1) == test_y).float().mean()
        return {"accuracy": right.item(), "loss": F.cross_entropy(scores, test_y).item()}

    for epoch in pace.epochs(options.epochs):
        for x, y in loader:
            pipe.step(x, y)
        figures = pace.evaluate(accuracy)
        if figures:
            pace.print(f"epoch {epoch + 1}: accuracy {figures['accuracy']:.3f}, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    main()
