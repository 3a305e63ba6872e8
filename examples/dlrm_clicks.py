"""A small DLRM on synthetic clicks: `paceline train examples/dlrm_clicks.py --mesh data=2,shard=2`, or alone.

Ids are as skewed as those of real logs (Zipf), and clicks depend on hidden tastes of users and items. The
table of users is larger than one worker's budget, so the planner splits it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.parallel.embedding import EmbeddingTables, RowWiseAdagrad, Table

WIDTH, NUMBERS = 16, 4
TABLES = (
    Table("user", 60_000, WIDTH),
    Table("item", 8_000, WIDTH),
    Table("seen", 8_000, WIDTH, pooling="mean", per_sample=5),
    Table("country", 60, WIDTH),
)
BUDGET_BYTES = 3_500_000


def zipf(rows: int, shape: tuple[int, ...], draw: torch.Generator, exponent: float = 1.05) -> Tensor:
    """Ids of which few are frequent and most are rare; which ones is shuffled."""
    weights = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent)
    places = torch.rand(shape, generator=draw, dtype=torch.float64) * weights.sum()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    return order[torch.searchsorted(weights.cumsum(0), places).clamp(max=rows - 1)]


def clicks(samples: int, seed: int) -> TensorDataset:
    """Numbers, ids of user, item, country and five items seen before, and whether the user clicked."""
    draw, truth = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    taste = {table.name: torch.randn(table.rows, 6, generator=truth) for table in TABLES}
    user, item, country = (zipf(TABLES[i].rows, (samples,), draw) for i in (0, 1, 3))
    seen = zipf(TABLES[2].rows, (samples, 5), draw)
    numbers = torch.randn(samples, NUMBERS, generator=draw)
    likes = (taste["user"][user] + taste["country"][country]) * taste["item"][item]
    score = likes.sum(1) * 0.7 + taste["item"][seen].mean(1)[:, 0] * 2 + numbers[:, 0] - 1
    clicked = (torch.rand(samples, generator=draw) < torch.sigmoid(score)).float()
    return TensorDataset(numbers, torch.stack([user, item, country], 1), seen, clicked)


class DLRM(nn.Module):
    """Numbers and embeddings, all products of two of them, and a small network on top."""

    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, WIDTH), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(WIDTH + 10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("pairs", torch.triu_indices(5, 5, 1), persistent=False)

    def forward(self, numbers: Tensor, ids: Tensor, seen: Tensor) -> Tensor:
        user, item, country = ids.unbind(1)
        found = self.tables({"user": user, "item": item, "seen": seen, "country": country})
        below = self.bottom(numbers)
        all_of_them = torch.stack([below, *found.values()], 1)
        products = all_of_them @ all_of_them.transpose(1, 2)
        return self.top(torch.cat([below, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1, help="steps between two synchronisations of tables")
    parser.add_argument(
        "--budget-bytes", type=int, default=BUDGET_BYTES, help="of a worker, if there are several"
    )
    options = parser.parse_args()

    pace = paceline.join("sparse_2d")
    mesh = pace.mesh(data=2, shard=2)
    torch.manual_seed(0)
    budget = options.budget_bytes if mesh.size("shard") > 1 else None
    tables = EmbeddingTables(mesh, TABLES, every=options.every, budget_bytes=budget)
    for line in tables.placement.lines():
        pace.print(line)
    model = DLRM(tables)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    rows = RowWiseAdagrad(tables.weights, lr=0.03)
    tables.trained_by(rows)
    loader = DataLoader(clicks(options.samples, seed=1), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    test = clicks(4_000, seed=2).tensors

    def measure(model: nn.Module) -> dict[str, float]:
        scores = model(*test[:3])
        right = ((scores > 0) == (test[3] > 0.5)).float().mean()
        return {"accuracy": right.item(), "loss": F.binary_cross_entropy_with_logits(scores, test[3]).item()}

    for epoch in pace.epochs(options.epochs):
        for numbers, ids, seen, clicked in loader:
            loss = F.binary_cross_entropy_with_logits(model(numbers, ids, seen), clicked)
            loss.backward()
            optimizer.step()
            rows.step()
            optimizer.zero_grad()
            rows.zero_grad()
            pace.report(loss=loss.item())
        figures = pace.evaluate(measure)
        if figures:
            pace.print(f"epoch {epoch + 1}: accuracy {figures['accuracy']:.3f}, loss {figures['loss']:.3f}")


if __name__ == "__main__":
    main()
