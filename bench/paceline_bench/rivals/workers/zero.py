"""DeepSpeed's ZeRO on CPUs over gloo: the optimizer's state in shards, gradients reduced by its engine.

Gradients leave during the backward pass, so the emulated device computes before it; the pass proper (a few
milliseconds) comes after the device's time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.config import RunConfig
from paceline_bench.cluster.other import run
from paceline_bench.rivals.workers.group import GroupPace

NAME = "deepspeed"
STAGE = 1


class ZeroPace(GroupPace):
    """The engine in the model's and the optimizer's place."""

    name = NAME

    def __init__(self, config: RunConfig, snapshots: Path | None, told: argparse.Namespace) -> None:
        super().__init__(config, None, told)
        self._kept = None if snapshots is None else snapshots.with_suffix(".deepspeed")

    def meet(self) -> None:
        """Its own way."""
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # held to TCP: hosts of a testbed share memory, over which it would go round the links otherwise
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def prepare(self, model: nn.Module, optimizer: Any, loader: DataLoader[Any], scheduler: Any) -> Any:
        """An engine around all."""
        import deepspeed

        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        settings = {
            "train_micro_batch_size_per_gpu": loader.batch_size,
            "zero_optimization": {"stage": STAGE},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1 << 30,
        }
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        return self._engine, ZeroStepped(self._engine.step), self.deal(loader), scheduler

    def backward(self, loss: Tensor) -> None:
        """The engine's own, after the device's time."""
        self.computed()
        self._engine.backward(loss)

    def _keep(self, epochs: int) -> None:
        """DeepSpeed's own checkpoint: every rank has a part of it."""
        if self._kept is not None:
            about = {"steps": self.steps, "epochs": epochs}
            self._engine.save_checkpoint(str(self._kept), tag=f"epoch{epochs}", client_state=about)

    def _restored(self) -> int:
        if self._kept is None or not (self._kept / "latest").exists():
            return 0
        _, about = self._engine.load_checkpoint(str(self._kept))
        self.steps = int(about["steps"])
        self.samples = self.steps * self._batch * self.size
        self.go_on()
        return int(about["epochs"])


class ZeroStepped:
    """In the optimizer's place: the engine steps, and clears gradients itself."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.step = step

    def zero_grad(self) -> None:
        """Done already."""


if __name__ == "__main__":
    run(ZeroPace, NAME)
