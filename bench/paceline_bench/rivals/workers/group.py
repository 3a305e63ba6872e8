"""What all rivals have in common whose workers meet in a process group of torch, over gloo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

from paceline.config import RunConfig
from paceline_bench.cluster.other import OtherPace


class GroupPace(OtherPace):
    """Comes and leaves with the others."""

    name: ClassVar[str]

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        self.meet()
        super().__init__(self.name, config, snapshots, dist.get_rank(), dist.get_world_size())

    def meet(self) -> None:
        """Make the group."""
        dist.init_process_group("gloo")

    def close(self) -> None:
        """Leave together."""
        super().close()
        dist.destroy_process_group()
