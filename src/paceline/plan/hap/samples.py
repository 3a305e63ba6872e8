"""Modules of torch that treat every sample of a batch alone, so that a batch can be cut for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

Shape = tuple[int, ...]
ALONE = (
    nn.GroupNorm, nn.Conv1d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Conv2d,
    nn.Upsample, nn.PixelShuffle, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d,
    nn.PReLU, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.ZeroPad2d, nn.LocalResponseNorm, nn.RMSNorm,
)  # fmt: skip
SEQUENCES = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.LSTM, nn.GRU, nn.RNN,
)  # fmt: skip
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def by_sample(part: nn.Module, given: Sequence[Shape], made: Shape) -> dict[str, Any] | None:
    """Which dimension is that of samples, and which inputs have it; None if samples are not alone."""
    if isinstance(part, NORMS):
        return {"sums": 4 * given[0][1] if uses_batch(part) else 0} if len(given) == 1 else None
    if isinstance(part, ALONE):
        return {"dim": 0, "cut": [0]} if len(given) == 1 and given[0][0] == made[0] else None
    if not isinstance(part, SEQUENCES) or any(len(shape) != 3 for shape in given):
        return None
    dim = 0 if _batch_first(part) else 1
    several = isinstance(part, nn.MultiheadAttention)
    if len(made) != 3 or len(given) != (3 if several else 1) or given[0][dim] != made[dim]:
        return None
    return {"dim": dim, "cut": list(range(len(given)))}


def uses_batch(part: Any) -> bool:
    """Whether a BatchNorm computes statistics of its batch."""
    return bool(part.training or part.running_mean is None)


def _batch_first(part: Any) -> bool:
    if isinstance(part, nn.TransformerEncoder):
        return _batch_first(part.layers[0])
    return bool(
        part.self_attn.batch_first if isinstance(part, nn.TransformerEncoderLayer) else part.batch_first
    )


def products(part: nn.Module, made: Shape) -> float:
    """Flops of the forward pass: every weight once for each place of the result, about."""
    places = 1.0
    for size in made[:-1] if isinstance(part, SEQUENCES) else (made[0], *made[2:]):
        places *= size
    return 2.0 * places * sum(p.numel() for p in part.parameters() if p.dim() > 1)
