"""The models of the cases."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def noisy() -> nn.Module:
    """Dropout draws random numbers, BatchNorm keeps buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def normed() -> nn.Module:
    """BatchNorm keeps buffers, and nothing is drawn at random."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Sum(nn.Module):
    """The gradient of one sample is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


class SumInParts(nn.Module):
    """The same, of five parameters: each has the sample for its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.arange(5.0)) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ sum(self.parts, torch.zeros(5, dtype=x.dtype))


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 3, sparse=sparse)
        self.mix = nn.Linear(3, 3)
        self.out = nn.Linear(3, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embed(x).mean(1))))


class Embedded(nn.Module):
    """Gradients of the table are sparse; all but the last of its rows are used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4, sparse=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).mean(1))


class Heads(nn.Module):
    """Some parameters have no gradient in some steps: a batch without the last class, one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.main, self.rare = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.never = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, rare: Tensor | None = None) -> Tensor:
        hidden = torch.tanh(self.body(x))
        out = self.main(hidden)
        if rare is not None and bool(rare.any()):
            out = torch.where(rare[:, None], out + self.rare(hidden), out)
        return out


class HalfFrozen(nn.Module):
    """A backbone that is not trained, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 8).requires_grad_(False)
        self.head = nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x))) * self.scale


class TwoTypes(nn.Module):
    """float32 and float64 in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(6, 8), nn.Linear(8, 3)

    def to(self, dtype: torch.dtype) -> TwoTypes:  # type: ignore[override]
        self.lower.float()
        self.upper.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.upper(torch.tanh(self.lower(x.float())).double())


def channels_last() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(12, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def wide() -> nn.Module:
    """Large enough for several threads to share its update."""
    return nn.Sequential(nn.Linear(6, 800), nn.Tanh(), nn.Linear(800, 800), nn.Tanh(), nn.Linear(800, 3))


def compiled() -> nn.Module:
    return torch.compile(mlp(), backend="aot_eager")  # type: ignore[return-value]
