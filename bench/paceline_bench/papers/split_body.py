"""The bodies that recipes for split models train in real processes: a pipeline on the digits, and clicks.

What a stage of a pipeline computes depends on what comes to it and not on when, so that neither the load of
the machine nor its cores change what is learned. Times of these runs mean nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.embedding import EmbeddingTables, RowWiseAdagrad, Table
from paceline.parallel.pipeline import pipeline
from paceline_bench.papers.body import digits, left_of_rate, measured
from paceline_bench.strategies.runs.models import Residual

TABLES = (Table("user", 4_000, 8), Table("item", 1_000, 8))
TASTES = 4
"""Numbers that decide what a user likes."""
WIDTH = 16
"""Channels of the residual network at first."""


def options() -> argparse.Namespace:
    """What all are told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--clicks", action="store_true")
    parser.add_argument("--digits", type=Path)
    parser.add_argument("--images", type=int, default=20_000, help="at most so many samples to train on")
    parser.add_argument("--noise", type=float, default=0.3)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--network", choices=NETWORKS, default="residual")
    parser.add_argument("--scale", type=float, default=0.0, help="of moments; 0: as many as groups")
    parser.add_argument("--seed", type=int, required=True)
    return parser.parse_args()


def in_a_row(seed: int) -> nn.Sequential:
    """Eight blocks with no way around them, two for each of four stages."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()) for _ in range(7)]
    return nn.Sequential(*blocks, nn.Linear(64, 10))


def residual(seed: int) -> nn.Sequential:
    """A ResNet for images of 8 x 8: a convolution, eight blocks of two, and a linear layer."""
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), conv(1, WIDTH), norm(WIDTH), nn.ReLU())
    blocks = [basic(WIDTH, WIDTH) for _ in range(4)]
    smaller = [basic(WIDTH, 2 * WIDTH, stride=2), *(basic(2 * WIDTH, 2 * WIDTH) for _ in range(3))]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * WIDTH, 10))
    return nn.Sequential(first, *blocks, *smaller, head)


def basic(channels: int, made: int, stride: int = 1) -> nn.Module:
    """Two convolutions and a way around them. Groups of channels are normalised, not batches: a stage that
    forwards a batch twice would count it twice."""
    block = nn.Sequential(conv(channels, made, stride), norm(made), nn.ReLU(), conv(made, made), norm(made))
    around = None if channels == made else nn.Conv2d(channels, made, 1, stride=stride, bias=False)
    return nn.Sequential(Residual(block, around), nn.ReLU())


def conv(channels: int, made: int, stride: int = 1) -> nn.Module:
    """3 x 3."""
    return nn.Conv2d(channels, made, 3, stride=stride, padding=1, bias=False)


def norm(channels: int) -> nn.Module:
    """Of each sample by itself."""
    return nn.GroupNorm(4, channels)


NETWORKS = {"residual": residual, "row": in_a_row}
CUTS = {"residual": {4: (3, 5, 7), 2: (5,)}, "row": {4: (2, 4, 6), 2: (4,)}}
"""Where stages begin, by their number."""


def train_pipeline(pace: Any, told: argparse.Namespace) -> None:
    """Stages that wait for each other, or do not, as the protocol says."""
    mesh, data, model = pace.mesh(stage=4), digits(told), NETWORKS[told.network](told.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=told.lr, momentum=told.momentum)
    loader = DataLoader(data.training, batch_size=told.batch, shuffle=True, drop_last=True)
    batches = told.epochs * len(loader)
    scheduler = LambdaLR(optimizer, lambda done: left_of_rate(done / batches))
    cuts = CUTS[told.network].get(mesh.size("stage"))
    pipe, loader = pipeline(
        pace, mesh, model, optimizer, loader, loss=F.cross_entropy, scheduler=scheduler, cuts=cuts
    )
    for _ in pace.epochs(told.epochs):
        for pixels, classes in loader:
            pipe.step(pixels, classes)
            scheduler.step()
        pace.evaluate(lambda model: measured(model, data))


class Clicks(nn.Module):
    """A user's row times an item's, and a number on top."""

    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor) -> Tensor:
        found = self.tables({"user": ids[:, 0], "item": ids[:, 1]})
        user, item = found["user"], found["item"]
        score: Tensor = self.top(torch.cat([user, item, user * item], 1))
        return score.squeeze(1)


def clicks(samples: int, seed: int) -> TensorDataset:
    """Ids of which few are frequent, and whether there was a click: by tastes that are always the same."""
    draw, truth = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    tastes = [torch.randn(table.rows, TASTES, generator=truth) for table in TABLES]
    chances = [1.0 / torch.arange(1, table.rows + 1) for table in TABLES]
    ids = [torch.multinomial(chance, samples, replacement=True, generator=draw) for chance in chances]
    score = (tastes[0][ids[0]] * tastes[1][ids[1]]).sum(1)
    clicked = (torch.rand(samples, generator=draw) < torch.sigmoid(score)).float()
    return TensorDataset(torch.stack(ids, 1), clicked)


def train_clicks(pace: Any, told: argparse.Namespace) -> None:
    """Tables split inside groups of workers, and copied over groups."""
    mesh = pace.mesh(data=2, shard=2)
    torch.manual_seed(told.seed)
    tables = EmbeddingTables(mesh, TABLES)
    model = Clicks(tables)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    rows = RowWiseAdagrad(tables.weights, lr=told.lr, moment_scale=told.scale or "groups")
    tables.trained_by(rows)
    loader = DataLoader(clicks(told.images, 1), batch_size=told.batch, shuffle=True, drop_last=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    ids, clicked = clicks(4_000, 2).tensors
    for _ in pace.epochs(told.epochs):
        for batch, answers in loader:
            F.binary_cross_entropy_with_logits(model(batch), answers).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rows.step()
            optimizer.zero_grad()
            rows.zero_grad()
        pace.evaluate(lambda model: {"accuracy": ranked(model(ids), clicked)})


def ranked(scores: Tensor, clicked: Tensor) -> float:
    """The area under the curve: how often a click is ranked above what was not clicked."""
    ranks = scores.argsort().argsort().double() + 1
    yes = clicked.sum().item()
    above = ranks[clicked > 0].sum().item() - yes * (yes + 1) / 2
    return float(above / (yes * (len(clicked) - yes)))


def main() -> None:
    """Whichever is asked for."""
    torch.set_num_threads(1)
    told = options()
    if told.clicks:
        train_clicks(paceline.join("sparse_2d"), told)
    else:
        train_pipeline(paceline.join("layerwise"), told)


if __name__ == "__main__":
    main()
