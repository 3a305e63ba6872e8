"""Gap-Aware: a gradient counts less, the further the weights have moved since they were read.

Paper: Barkai, Hakimi, Schuster, "Gap-Aware Mitigation of Gradient Staleness", ICLR 2020, arXiv 1909.10802.

Element by element the gradient is divided by 1 + |w - r| / C: r is what its worker has read, C how far one
step moves that element on average. Invariant: where nothing has moved (w = r) it is divided by exactly 1.

Where we differ: C is a running mean (a hundred steps, bias-corrected by beginning with the first), so that it
follows a learning rate that decays. After DANA the divisor is max(1, |w - r| / C): what a worker reads there
is ahead of the weights by one step of everybody, which is no staleness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.store.corrections.rule import Shared

STEPS = 100
"""How many steps the mean size of a step looks back, about."""
MEAN_STEP = "mean_step"


class GapAware:
    """One divisor per element."""

    memory: tuple[str, ...] = (MEAN_STEP,)
    watches = True

    def __init__(self, ahead: bool = False) -> None:
        """`ahead`: whether workers read a look-ahead."""
        self._ahead = ahead

    def mend(self, gradient: Tensor, now: Tensor, read: Tensor, shared: Shared) -> None:
        """Divide by the gap."""
        least = torch.finfo(now.dtype).tiny
        gap = torch.sub(now, read).abs_().div_(shared[MEAN_STEP].clamp_min(least))
        gradient.div_(gap.clamp_min_(1.0) if self._ahead else gap.add_(1.0))

    def moved(self, before: Tensor, now: Tensor, shared: Shared) -> None:
        """Learn how large steps are; an element's first step is its mean."""
        mean, step = shared[MEAN_STEP], before.sub_(now).abs_()
        torch.where(mean == 0, step, mean.lerp(step, 1 / STEPS), out=mean)
