"""Averages gradients over the workers of a line, after every one of them has computed its part."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.parallel.sequence.line import Line


def average_gradients(parameters: Iterable[Tensor], line: Line, alone: Iterable[Tensor] = ()) -> None:
    """The mean over the line, in one exchange per type. Of what is `alone` on this worker, its share."""
    if line.size == 1:
        return
    own = {id(p) for p in alone}
    shared: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None and id(p) in own:
            p.grad.div_(line.size)
        elif p.grad is not None:
            shared.setdefault(p.grad.dtype, []).append(p.grad)
    for gradients in shared.values():
        flat = line.all_reduce(torch.cat([each.reshape(-1) for each in gradients])).div_(line.size)
        pieces = torch.split(flat, [each.numel() for each in gradients])
        torch._foreach_copy_(
            gradients, [piece.view_as(each) for piece, each in zip(pieces, gradients, strict=True)]
        )
