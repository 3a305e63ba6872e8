"""The digits network as a recipe: model, data, loss and optimizer as functions, and nothing else."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))


def data() -> DataLoader:
    return DataLoader(TensorDataset(x[360:], y[360:]), batch_size=16, shuffle=True)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model: nn.Module) -> float:
    return (model(x[:360]).argmax(1) == y[:360]).float().mean().item()


if __name__ == "__main__":
    paceline.run(
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        evaluate=accuracy,
        epochs=4,
        protocol="ssp",
        staleness=3,
    )
