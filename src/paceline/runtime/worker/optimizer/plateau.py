"""Notices a schedule that follows a figure which only the lead has.

`pace.evaluate` gives its figures to the lead. A ReduceLROnPlateau that is stepped with them there lowers the
lead's rate alone, where every worker steps at its own. Who has shared the figure has called `pace.gather`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


class Unshared:
    """One per worker; only the lead ever holds figures."""

    def __init__(self, rank: int, say: Callable[[str], None]) -> None:
        self._rank, self._say = rank, say
        self._told = self._holds = False
        """Whether this was said; and whether it has figures that the others do not have."""

    def evaluated(self) -> None:
        """Here they are."""
        self._holds = True

    def shared(self) -> None:
        """Workers have told each other something."""
        self._holds = False

    def watch(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Look at every ReduceLROnPlateau of these, made before or after."""
        plain = ReduceLROnPlateau.step

        def step(scheduler: ReduceLROnPlateau, *args: Any, **kwargs: Any) -> None:
            before = _rates(scheduler.optimizer)
            plain(scheduler, *args, **kwargs)
            after = _rates(scheduler.optimizer)
            mine = any(scheduler.optimizer is each for each in optimizers)
            if mine and after != before and self._holds and not self._told:
                self._mention(before, after)

        ReduceLROnPlateau.step = step  # type: ignore[assignment, method-assign]

    def _mention(self, before: list[float], after: list[float]) -> None:
        was, now = next((a, b) for a, b in zip(before, after, strict=True) if a != b)
        self._told = True
        self._say(
            f"rank {self._rank} lowers its learning rate from {was:g} to {now:g} by a figure of "
            "pace.evaluate() that only it has, and the other workers go on with theirs. Share the figure "
            'with pace.gather(v["loss"] if v else 0.0)[0].item(), and step the scheduler on all workers'
        )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]
