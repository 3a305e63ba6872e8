"""Post-local SGD as torch has it: DDP first, then steps of one's own, and an average now and then."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline_bench.cluster.other import OtherPace, run

NAME = "post_local_sgd"
TOGETHER = 8
"""Steps under DDP before the first of one's own."""
PERIOD = 4
"""Steps between two averages, as for our `local_sgd`; copies of weights are taken just after one."""


class PostLocalPace(OtherPace):
    """DDP with torch's hook and optimizer."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        super().__init__(NAME, config, snapshots, dist.get_rank(), dist.get_world_size())

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the model and the optimizer."""
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        local = PostLocalSGDState(None, None, TOGETHER, post_local_gradient_allreduce=False)  # type: ignore[no-untyped-call]
        # not the method itself: DDP compares annotations, and ours are strings
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(local, bucket))
        averager = PeriodicModelAverager(period=PERIOD, warmup_steps=TOGETHER - 1)
        averaged = PostLocalSGDOptimizer(optim=optimizer, averager=averager)
        return wrapped, averaged, self.deal(loader), scheduler

    def close(self) -> None:
        """Leave together."""
        super().close()
        dist.destroy_process_group()

    def _reduce(self, local: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The gradient is complete: wait for the device, then do as the hook does."""
        if bucket.is_last():
            self.computed()
        return post_localSGD_hook(local, bucket)


if __name__ == "__main__":
    run(PostLocalPace, NAME)
