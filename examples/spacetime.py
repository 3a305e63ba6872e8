"""Train a space-time transformer on moving digits, its sequences cut: `--mesh sequence=4`, or alone."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from digits import digits
from paceline.parallel.sequence import Line, gather, parallelize, split, switch

TIME, SPACE = 1, 2
FRAMES, PATCH = 6, 2
PLACES = (8 // PATCH) ** 2
WAYS = ((0, 1), (0, -1), (1, 0), (-1, 0))


def film(images: Tensor, ways: Tensor) -> Tensor:
    """Digits that roll over the edge, as [samples, frames, patches, pixels of a patch]."""
    frames = torch.stack([images[:, 0]] * FRAMES, TIME)
    for way, (down, right) in enumerate(WAYS):
        for t in range(FRAMES):
            rolled = images[ways == way, 0].roll((t * PATCH * down, t * PATCH * right), (1, 2))
            frames[ways == way, t] = rolled
    patches = frames.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return patches.reshape(len(images), FRAMES, PLACES, PATCH * PATCH)


def block(width: int) -> nn.Module:
    """Attention and a small network for every token."""
    return nn.TransformerEncoderLayer(width, 4, 2 * width, 0.05, batch_first=True, norm_first=True)


class SpaceTime(nn.Module):
    """Blocks that attend over space and over time in turns: torch's own, not changed for being split."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.line = Line()  # one worker; parallelize() puts that of the mesh in its place
        self.embed = nn.Linear(PATCH * PATCH, width)
        self.when = nn.Parameter(0.1 * torch.randn(FRAMES, 1, width))
        self.where = nn.Parameter(0.1 * torch.randn(PLACES, width))
        self.spatial, self.temporal = (nn.ModuleList(block(width) for _ in range(layers)) for _ in range(2))
        self.digit, self.way = (nn.Linear(PLACES * width, classes) for classes in (10, len(WAYS)))

    def forward(self, video: Tensor) -> tuple[Tensor, Tensor]:
        x = split(self.embed(video) + self.when + self.where, TIME, self.line)
        for spatial, temporal in zip(self.spatial, self.temporal, strict=True):
            x = switch(x, TIME).map(lambda part, block=spatial: block(part.flatten(0, 1)).view_as(part))
            x = switch(x, SPACE).map(lambda part, block=temporal: over_time(block, part))
        seen = gather(x)[:, 0].flatten(1)  # the first frame, which has heard of the others
        return self.digit(seen), self.way(seen)


def over_time(block: nn.Module, part: Tensor) -> Tensor:
    rows = part.transpose(TIME, SPACE)
    return block(rows.flatten(0, 1)).view(rows.shape).transpose(TIME, SPACE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--samples", type=int, default=1437, help="of the training set, at most")
    options = parser.parse_args()

    pace = paceline.join("dynamic_sequence")
    mesh = pace.mesh(sequence=4)
    torch.manual_seed(0)
    train, test_x, test_y = digits()
    images, labels = (each[: options.samples] for each in train.tensors)
    ways = torch.arange(len(images) + len(test_y)) % len(WAYS)
    films = TensorDataset(film(images, ways[: len(images)]), labels, ways[: len(images)])
    test_ways = ways[len(images) :]
    test_films = film(test_x, test_ways)
    model = parallelize(SpaceTime(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(films, batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)

    def accuracy(model: nn.Module) -> dict[str, float]:
        digit, way = model(test_films)
        right = (digit.argmax(1) == test_y) & (way.argmax(1) == test_ways)
        return {"accuracy": right.float().mean().item()}

    for epoch in pace.epochs(options.epochs):
        for video, number, direction in loader:
            digit, way = model(video)
            loss = F.cross_entropy(digit, number) + F.cross_entropy(way, direction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pace.report(loss=loss.item())
        figures = pace.evaluate(accuracy)
        if figures:
            pace.print(f"epoch {epoch + 1}: accuracy {figures['accuracy']:.3f}")


if __name__ == "__main__":
    main()
