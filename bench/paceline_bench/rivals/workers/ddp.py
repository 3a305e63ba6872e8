"""DistributedDataParallel over gloo. The model fits into its first bucket: it has nothing to send before."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader

from paceline_bench.cluster.other import NAME, run
from paceline_bench.rivals.workers.group import GroupPace
from paceline_bench.wrapped.ddp import wrapped


class DDPPace(GroupPace):
    """The model wrapped, and a hook that waits for the emulated device."""

    name = NAME

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the model."""
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        return wrapped(model, reduce=self._reduce), optimizer, self.deal(loader), scheduler

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The gradient is complete: wait for the device, then for the others."""
        if bucket.is_last():
            self.computed()
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)


if __name__ == "__main__":
    run(DDPPace, NAME)
