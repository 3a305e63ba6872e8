"""Train a small CNN on the digits set that scikit-learn ships. Runs alone, or with `paceline train`."""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline


def digits(test: int = 360) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Training set, test images and test labels: 8x8 pixels, ten classes, shuffled once."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[order].reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)[order]
    return TensorDataset(x[test:], y[test:]), x[:test], y[:test]


def network() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.03)
    options = parser.parse_args()

    pace = paceline.join("dssp", lower=3, upper=15)
    torch.manual_seed(0)
    train, test_x, test_y = digits()
    model = network()
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
            optimizer.step()
            optimizer.zero_grad()
            pace.report(loss=loss.item())
        figures = pace.evaluate(accuracy)
        if figures:
            pace.print(f"epoch {epoch + 1}: accuracy {figures['accuracy']:.3f}, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    main()
