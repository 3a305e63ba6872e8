"""Small models of every kind that HAP is to cut up, each with a batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH = 10


class WithLoss(nn.Module):
    """A model and its loss, as one graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.letters = model, isinstance(model, Attention)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.model(x)
        if self.letters:
            scores, y = scores.flatten(0, 1), y.flatten()
        return F.cross_entropy(scores, y)


class Experts(nn.Module):
    """A mixture of experts that all see every sample, weighted by a gate."""

    def __init__(self, width: int = 12, experts: int = 4, hidden: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 4)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 4)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        share = torch.softmax(self.gate(x), dim=-1)
        hidden = F.relu(torch.einsum("bd,edh->beh", x, self.up))
        mixed = torch.einsum("beh,ehd,be->bd", hidden, self.down, share)
        return self.head(x + mixed)


class Attention(nn.Module):
    """One transformer block on letters."""

    def __init__(self, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.heads, self.letters, self.places = heads, nn.Embedding(11, width), nn.Embedding(length, width)
        self.register_buffer("order", torch.arange(length))
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down, self.head = nn.Linear(width, 32), nn.Linear(32, width), nn.Linear(width, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places(self.order)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.down(F.gelu(self.up(x))))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 2 * 2, 5),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


KINDS = ("mlp", "cnn", "transformer", "experts")


def model(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in double precision, inputs and targets."""
    torch.manual_seed(3)
    y = torch.randint(0, 5, (BATCH,))
    made: nn.Module = {"mlp": mlp, "cnn": cnn, "experts": Experts, "transformer": Attention}[kind]()
    if kind == "transformer":
        return made.double(), torch.randint(0, 11, (BATCH, 6)), torch.randint(0, 11, (BATCH, 6))
    x = torch.randn(BATCH, 3, 8, 8) if kind == "cnn" else torch.randn(BATCH, 12)
    return made.double(), x.double(), y
