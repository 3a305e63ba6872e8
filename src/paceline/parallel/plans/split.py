"""A linear layer in slices of its input features, each gathered, used and freed before the next one.

`Y = X W + bias` becomes the sum of `X[..., slice] W[slice]`, and then the bias, once. The published
samples give every slice a bias of its own, which adds up, or drop it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SplitLinear(nn.Module):
    """Takes an `nn.Linear` apart; same result to rounding."""

    def __init__(self, linear: nn.Linear, slices: int) -> None:
        super().__init__()
        pieces = linear.weight.detach().tensor_split(slices, dim=1)
        self.sizes = [piece.shape[1] for piece in pieces]
        self.slices = nn.ModuleList(_slice(piece, linear.weight.requires_grad) for piece in pieces)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.sizes, dim=-1)
        total: Tensor = self.slices[0](parts[0])
        for part, layer in zip(parts[1:], list(self.slices)[1:], strict=True):
            total = total + layer(part)
        return total if self.bias is None else total + self.bias


def _slice(piece: Tensor, trained: bool) -> nn.Linear:
    with torch.device("meta"):
        layer = nn.Linear(piece.shape[1], piece.shape[0], bias=False)
    layer.weight = nn.Parameter(piece.clone(), requires_grad=trained)
    return layer
