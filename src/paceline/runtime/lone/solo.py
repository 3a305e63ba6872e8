"""A lone worker that nobody started: plain PyTorch, and nothing is written."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.runtime.worker.pace import Pace


class Solo(Pace):
    """`python script.py`: nobody started us, nothing is written."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> Any:
        return loader
