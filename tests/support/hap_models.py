"""Small models of every kind that HAP is to cut up, each with a batch."""

from __future__ import annotations

import math

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
        if isinstance(self.model, Tied):
            return self.model(x, y)[1]
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


class Residual(nn.Module):
    """Convolutions with BatchNorm, changed in place and added, as a ResNet does it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.after = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu, self.pool, self.head = nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        out = self.after(self.second(x))
        out += x
        return self.head(torch.flatten(self.pool(self.relu(out)), 1))


class Encoder(nn.Module):
    """A layer of torch's own, which is cut by samples."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.letters = nn.Embedding(11, width)
        self.body = nn.TransformerEncoderLayer(width, 4, 32, dropout=0.0, batch_first=True)
        self.heads = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.body(self.letters(ids))
        y, _ = self.heads(x, x, x, need_weights=False)
        return self.head((x + y).mean(1))


class Tied(nn.Module):
    """A language model as people write them: sizes are asserted and unpacked, a mask is a buffer, weights
    are tied, and it returns scores and loss."""

    def __init__(self, width: int = 16, heads: int = 4, length: int = 6) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.letters, self.places = nn.Embedding(11, width), nn.Embedding(length, width)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.letters.weight
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        batch, length = ids.size()
        assert length <= self.length, f"{length} letters are too many"
        x = self.letters(ids) + self.places(torch.arange(0, length, device=ids.device))
        width = x.shape[-1]
        q, k, v = self.qkv(self.norm(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = F.dropout(F.softmax(scores, dim=-1), 0.0, self.training) @ v
        logits = self.head(x + y.transpose(1, 2).contiguous().view(batch, length, width))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class WholeEnd(nn.Module):
    """Ends with an operation that has no rules, so that every device computes it in full."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(self.second(F.relu(self.first(x))), 1)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(6 * 2 * 2, 5),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 5))


KINDS = ("mlp", "cnn", "transformer", "experts", "residual", "encoder", "tied", "whole_end")


def model(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model in double precision, inputs and targets."""
    torch.manual_seed(3)
    y = torch.randint(0, 5, (BATCH,))
    makers = {"mlp": mlp, "cnn": cnn, "experts": Experts, "transformer": Attention, "residual": Residual}
    made: nn.Module = (makers | {"encoder": Encoder, "tied": Tied, "whole_end": WholeEnd})[kind]()
    if kind in ("transformer", "tied"):
        y = torch.randint(0, 11, (BATCH, 6))
        y[2, 3:] = -1 if kind == "tied" else 0
        return made.double(), torch.randint(0, 11, (BATCH, 6)), y
    if kind == "encoder":
        return made.double(), torch.randint(0, 11, (BATCH, 6)), y
    x = torch.randn(BATCH, 3, 8, 8) if kind in ("cnn", "residual") else torch.randn(BATCH, 12)
    return made.double(), x.double(), y
