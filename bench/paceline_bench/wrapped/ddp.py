"""DistributedDataParallel over gloo, as every benchmark has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Reduce = Callable[[Any], torch.futures.Future[torch.Tensor]]
"""What is done with a bucket of gradients that is complete."""


def wrapped(
    model: nn.Module, cap_mib: float | None = None, reduce: Reduce | None = None
) -> DistributedDataParallel:
    """A model whose gradients are averaged while backward runs; the process group is there. A size that is
    given is that of the first bucket, too (by default 1 MiB); a bucket is closed by the parameter with which
    it reaches it."""
    size: Any = cap_mib
    made = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=size)
    if reduce is not None:
        # not the function itself: DDP compares annotations, and ours are strings
        made.register_comm_hook(None, lambda state, bucket: reduce(bucket))
    return made
