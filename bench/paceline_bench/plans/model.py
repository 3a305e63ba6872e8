"""What the benchmark of plans trains: a small transformer under HAP, wide layers under OSDP.

Run as a script under `paceline train --plan`: `letters WIDTH LAYERS BATCH STEPS` or `wide WIDTH LAYERS BATCH
STEPS`."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

LETTERS, LENGTH = 32, 16


class LetterBlock(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Both are added to what comes in."""
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return made


class Letters(nn.Module):
    """A transformer on letters."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.length = LENGTH
        self.letters = nn.Embedding(LETTERS, width)
        self.blocks = nn.Sequential(*(LetterBlock(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next letters."""
        scores: Tensor = self.head(self.blocks(self.letters(x)))
        return scores


def letters_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of the next letters."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def letters_data(samples: int) -> TensorDataset:
    """Random ones."""
    made = torch.Generator().manual_seed(0)
    text = torch.randint(0, LETTERS, (samples, LENGTH + 1), generator=made)
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def wide(width: int, layers: int) -> nn.Module:
    """Layers of many bytes and little work."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def main() -> None:
    """One epoch of so many steps."""
    kind, width, layers, batch, steps = sys.argv[1], *map(int, sys.argv[2:])
    pace = paceline.join()
    torch.manual_seed(0)
    if kind == "letters":
        model: nn.Module = Letters(width, layers, 4)
        data = letters_data(batch * steps)
    else:
        model = wide(width, layers)
        samples = pace.size * batch * steps
        data = TensorDataset(torch.randn(samples, width), torch.zeros(samples))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(data, batch_size=batch)
    model, optimizer, loader = pace.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = letters_loss(model, x, y) if kind == "letters" else model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
