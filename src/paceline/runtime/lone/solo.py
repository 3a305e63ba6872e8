"""A lone worker that nobody started: plain PyTorch, and nothing is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.runtime.worker.pace import Pace


class Solo(Pace):
    """`python script.py`: nobody started us, nothing is written."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        return loader

    def _prepare_scheduler(self, scheduler: LRScheduler) -> None:
        pass

    def _idle(self) -> bool:
        return False

    def _away(self) -> None:
        pass

    def _back(self, values: dict[str, float], seconds: float) -> None:
        pass

    def _leave(self) -> None:
        pass

    def _plan(self, epochs: int) -> None:
        pass

    def _end_work(self, why: str) -> None:
        pass

    def _warn(self, text: str) -> None:
        print(f"warning: {text}", flush=True)
