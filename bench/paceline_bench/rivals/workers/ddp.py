"""DistributedDataParallel over gloo. The model fits into its first bucket: it has nothing to send before."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline_bench.cluster.other import NAME, OtherPace, run


class DDPPace(OtherPace):
    """The model wrapped, and a hook that waits for the emulated device."""

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        super().__init__(NAME, config, snapshots, dist.get_rank(), dist.get_world_size())

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """Wrap the model."""
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        # not the method itself: DDP compares annotations, and ours are strings
        wrapped.register_comm_hook(None, lambda state, bucket: self._reduce(bucket))
        return wrapped, optimizer, self.deal(loader), scheduler

    def close(self) -> None:
        """Leave together."""
        super().close()
        dist.destroy_process_group()

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The gradient is complete: wait for the device, then for the others."""
        if bucket.is_last():
            self.computed()
        assert dist.group.WORLD is not None
        return allreduce_hook(dist.group.WORLD, bucket)


if __name__ == "__main__":
    run(DDPPace, NAME)
