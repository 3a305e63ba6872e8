"""DC-ASGD: delay compensation, which moves a gradient to where the weights are now.

Paper: Zheng, Meng, Wang, Chen, Yu, Ma, Liu, "Asynchronous Stochastic Gradient Descent with Delay
Compensation", ICML 2017, arXiv 1609.08326.

A Taylor series whose second derivative is estimated by the gradient's own square: g + strength g g (w - r).
The adaptive form divides the strength by the root of a running mean of g g. Invariant: where nothing has
moved (w = r) the gradient stays as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.store.corrections.rule import Shared

SQUARES = "mean_square"
KEPT = 0.95
"""What is left of the mean square with every push."""
TINY = 1e-7


class DelayCompensation:
    """With a constant strength."""

    memory: tuple[str, ...] = ()
    watches = False

    def __init__(self, strength: float) -> None:
        self._strength = strength

    def mend(self, gradient: Tensor, now: Tensor, read: Tensor, shared: Shared) -> None:
        """Add what the way from `read` to `now` changes, to first order."""
        change = torch.sub(now, read).mul_(gradient).mul_(gradient)
        gradient.add_(change, alpha=self._strength)

    def moved(self, before: Tensor, now: Tensor, shared: Shared) -> None:
        """Nothing to learn."""


class AdaptiveDelayCompensation(DelayCompensation):
    """With a strength that falls as gradients grow."""

    memory: tuple[str, ...] = (SQUARES,)

    def mend(self, gradient: Tensor, now: Tensor, read: Tensor, shared: Shared) -> None:
        """The same, element by element as strong as the mean square says."""
        squares = shared[SQUARES].mul_(KEPT).addcmul_(gradient, gradient, value=1 - KEPT)
        change = torch.sub(now, read).mul_(gradient).mul_(gradient)
        gradient.addcdiv_(change, squares.add(TINY).sqrt_(), value=self._strength)
