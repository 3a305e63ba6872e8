"""Train a small transformer to continue a made-up language. Runs alone, or sharded with `paceline train
--plan`."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LETTERS, LENGTH = 32, 16


class Experts(nn.Module):
    """Feed-forward networks that all see every letter; a gate says how much each of them counts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) / (4 * width) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        share = F.softmax(self.gate(x), -1)
        y = F.gelu(torch.einsum("btw,ewh->bteh", x, self.up))
        made: Tensor = torch.einsum("bteh,ehw,bte->btw", y, self.down, share)
        return made


class Block(nn.Module):
    """Attention and a feed-forward network, each added to what came in."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.experts = Experts(width, experts) if experts else None
        if not experts:
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (
            f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + (self.down(F.gelu(self.up(y))) if self.experts is None else self.experts(y))


class Transformer(nn.Module):
    """Letters in, scores of the next letter out."""

    def __init__(self, width: int = 64, layers: int = 2, experts: int = 0, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads, experts) for _ in range(layers)))
        self.head = nn.Linear(width, LETTERS)
        self.register_buffer("order", torch.arange(LENGTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.letters(x) + self.places(self.order)))
        return scores


def text(samples: int = 512) -> TensorDataset:
    """Each letter follows from the two before it, most of the time."""
    made = torch.Generator().manual_seed(0)
    x = torch.randint(0, LETTERS, (samples, LENGTH + 1), generator=made)
    for at in range(2, LENGTH + 1):
        follows = torch.rand(samples, generator=made) < 0.9
        x[:, at] = torch.where(follows, (x[:, at - 1] * 3 + x[:, at - 2]) % LETTERS, x[:, at])
    return TensorDataset(x[:, :-1].contiguous(), x[:, 1:].contiguous())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="in each block; 0: a plain network")
    options = parser.parse_args()

    pace = paceline.join()
    torch.manual_seed(0)
    model = Transformer(options.width, options.layers, options.experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(text(), batch_size=options.batch_size, shuffle=True)
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
