"""Models to exchange: the tensors of a small transformer, as many and as uneven as real ones are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

LAYERS = 6
SETTINGS = {"sgd": {"lr": 1e-3}, "adamw": {"lr": 1e-3, "weight_decay": 0.01}}


def shapes(size_bytes: int) -> list[tuple[int, ...]]:
    """Tensor shapes that add up to about that much float32: 72 of a transformer and an embedding."""
    numbers = size_bytes // 4
    width = max(8, int(math.sqrt(numbers / (12 * LAYERS + 8))) // 8 * 8)
    each = _layer(width) * LAYERS
    rest = numbers - sum(math.prod(shape) for shape in each)
    return [(max(rest // width, 1), width), *each]


def _layer(width: int) -> list[tuple[int, ...]]:
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    linear = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    attention: list[tuple[int, ...]] = [linear[0], (3 * width,), linear[1], (width,)]
    feed_forward: list[tuple[int, ...]] = [linear[2], (4 * width,), linear[3], (width,)]
    return [*norm, *attention, *norm, *feed_forward]


class Weights(nn.Module):
    """Parameters and nothing else: what is measured is their exchange."""

    def __init__(self, sizes: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.tensors = nn.ParameterList(torch.randn(*size, generator=generator) for size in sizes)


def make_optimizer(name: str, parameters: Sequence[Tensor], variant: str | None) -> torch.optim.Optimizer:
    """SGD or AdamW; `variant` fused, foreach or plain (None: whatever torch chooses)."""
    cls = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    how = {None: {}, "plain": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    optimizer: torch.optim.Optimizer = cls(parameters, **SETTINGS[name], **how[variant])
    return optimizer
