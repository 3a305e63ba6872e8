"""Tensors as bytes, for `pace.gather`: what they are first, then their contents in pieces for messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.decoding import decode_message
from paceline.errors import ConfigError

Exchange = Callable[[bytes, bool], dict[int, bytes]]
"""Gives bytes and gets those of all by rank; whether more is to follow."""
LARGEST_ANSWER = 4 << 20


class Kind(msgspec.Struct, frozen=True):
    """What a worker brings."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its contents."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def as_rows(value: Any) -> Tensor:
    """A tensor with a first dimension; a number is a row of one."""
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(value)
    return tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()


def gather(value: Any, exchange: Exchange) -> Tensor:
    """The rows of all workers, by rank, where this worker's lie."""
    rows = as_rows(value)
    mine = Kind(str(rows.dtype).removeprefix("torch."), tuple(rows.shape))
    told = exchange(msgspec.msgpack.encode(mine), True)
    kinds = {rank: decode_message(text, kind=Kind) for rank, text in told.items()}
    _check_alike(kinds)
    piece = LARGEST_ANSWER // len(kinds)
    count = max(1, -(-max(kind.size_bytes for kind in kinds.values()) // piece))
    content, found = _bytes(rows), {rank: bytearray() for rank in kinds}
    for number in range(count):
        part = content[number * piece : (number + 1) * piece]
        for rank, data in exchange(part, number + 1 < count).items():
            found[rank] += data
    return torch.cat([_tensor(kinds[rank], found[rank]) for rank in sorted(kinds)]).to(rows.device)


def _check_alike(kinds: dict[int, Kind]) -> None:
    (first, one), *others = sorted(kinds.items())
    for rank, other in others:
        if (one.dtype, one.shape[1:]) != (other.dtype, other.shape[1:]):
            raise ConfigError(
                f"pace.gather() got {one.dtype} of shape {one.shape} on rank {first} and {other.dtype} of "
                f"shape {other.shape} on rank {rank}. Only the first dimension may differ."
            )


def _bytes(rows: Tensor) -> bytes:
    flat = rows.cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _tensor(kind: Kind, content: bytearray) -> Tensor:
    dtype = getattr(torch, kind.dtype)
    flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
    return flat.reshape(kind.shape)
