"""Averages gradients over the workers of a line, after every one of them has computed its part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        if id(p) not in own and p.requires_grad:
            shared.setdefault(p.dtype, []).append(p)
        elif id(p) in own and p.grad is not None:
            p.grad.div_(line.size)
    for alike in shared.values():
        _average(alike, line)


def _average(parameters: Sequence[Tensor], line: Line) -> None:
    """Of one type. Who has no gradient counts as zero; one that nobody has stays none."""
    there = torch.tensor([float(p.grad is not None) for p in parameters], dtype=parameters[0].dtype)
    given = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = line.all_reduce(torch.cat([*(each.reshape(-1) for each in given), there.to(given[0].device)]))
    *sums, told = torch.split(flat, [*(p.numel() for p in parameters), len(there)])
    for p, own, summed, known in zip(parameters, given, sums, told.tolist(), strict=True):
        if known:
            own.copy_(summed.div_(line.size).view_as(own))
            p.grad = own
