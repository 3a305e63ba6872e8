"""Post-local SGD as torch has it: DDP first, then steps of one's own, and an average now and then."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.utils.data import DataLoader

from paceline_bench.cluster.other import run
from paceline_bench.rivals.workers.group import GroupPace
from paceline_bench.wrapped.ddp import wrapped

NAME = "post_local_sgd"
TOGETHER = 8
"""Steps under DDP before the first of one's own."""
PERIOD = 4
"""Steps between two averages, as for our `local_sgd`; copies of weights are taken just after one."""


class PostLocalPace(GroupPace):
    """DDP with torch's hook and optimizer."""

    name = NAME

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the model and the optimizer."""
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        local = PostLocalSGDState(None, None, TOGETHER, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        replicas = wrapped(model, reduce=partial(self._reduce, local))
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=TOGETHER - 1)
        averaged = PostLocalSGDOptimizer(optim=optimizer, averager=averager)
        return replicas, averaged, self.deal(loader), scheduler

    def _reduce(self, local: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The gradient is complete: wait for the device, then do as the hook does."""
        if bucket.is_last():
            self.computed()
        return post_localSGD_hook(local, bucket)


if __name__ == "__main__":
    run(PostLocalPace, NAME)
