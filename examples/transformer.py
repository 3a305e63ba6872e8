"""Train a small transformer to continue a made-up language. Runs alone, or sharded with `paceline train
--plan`."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LETTERS = 32


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Transformer(nn.Module):
    """Letters in, scores of the next letter out."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, LETTERS)
        self.register_buffer("order", torch.arange(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.letters(x) + self.places(self.order)))
        return scores


def text(samples: int, length: int) -> TensorDataset:
    """Each letter follows from the two before it, most of the time."""
    made = torch.Generator().manual_seed(0)
    x = torch.randint(0, LETTERS, (samples, length + 1), generator=made)
    for at in range(2, length + 1):
        follows = torch.rand(samples, generator=made) < 0.9
        x[:, at] = torch.where(follows, (x[:, at - 1] * 3 + x[:, at - 2]) % LETTERS, x[:, at])
    return TensorDataset(x[:, :-1].contiguous(), x[:, 1:].contiguous())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--samples", type=int, default=512)
    options = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(text(options.samples, options.length), batch_size=options.batch_size, shuffle=True)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for epoch in pace.epochs(options.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            pace.report(loss=loss.item())
        pace.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
