"""Event-triggered pushes: a worker keeps its gradient until it is worth sending, and loses nothing of it.

Paper: Yu, Chen, Poor, "Distributed Stochastic Gradient Descent with Staleness" (SDDE), arXiv 2406.11159,
whose fifth policy sends a gradient only if its norm exceeds a threshold. What is not sent is added to the
next one here, as if the script had not called `optimizer.step()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from paceline.store.work.budget import Batch

LAST = 100
"""So many norms a running mean is of, about, once it has seen them."""


class Withheld:
    """The sum of gradients that a worker has computed and not pushed, and what is to be told of it."""

    def __init__(self) -> None:
        self.steps = 0
        """Calls of `optimizer.step()` that it is made of."""
        self.samples = 0
        self.used: list[Batch] = []
        self.compute_s = 0.0
        self.missing: frozenset[int] = frozenset()
        """The parameters that none of them had a gradient for."""
        self.memory: list[Tensor] = []
        """The sum; it stays for the next one."""

    def add(self, gradients: Sequence[Tensor], missing: Sequence[int]) -> None:
        """One more gradient; its data and its time are told with `count`."""
        if not self.memory:
            self.memory = [torch.empty_like(each) for each in gradients]
        for total, each in zip(self.memory, gradients, strict=True):
            if self.steps:
                total.add_(each)
            else:
                total.copy_(each)
        self.missing = self.missing.intersection(missing) if self.steps else frozenset(missing)
        self.steps += 1

    def count(self, samples: int, used: Sequence[Batch], compute_s: float) -> None:
        """The data behind the gradient that was added, and the time it took."""
        self.samples += samples
        self.used += used
        self.compute_s += compute_s

    def clear(self) -> None:
        """It was pushed, or is given up."""
        self.steps, self.samples, self.used, self.compute_s = 0, 0, [], 0.0

    @property
    def each(self) -> int:
        """Samples of one of its gradients: what a sum counts by in a mean of sums."""
        return max(1, round(self.samples / self.steps)) if self.samples else 0


class Trigger:
    """Says after each `optimizer.step()` of a script whether its worker pushes.

    Let n be the Euclidean norm of that step's own gradient, over all trained parameters and as the script
    leaves it (clipped by the script, say), and m the worker's running mean of these n: the mean of all so
    far, and after 100 of them m + (n - m) / 100; the step's own n is in it. The worker pushes if the norm of
    the sum of its gradients since the last push is at least `share` x m, if that is not a number, or if the
    sum is of `most` gradients.
    """

    def __init__(self, share: float, most: int) -> None:
        self._share, self._most = share, most
        self._seen, self._mean = 0, 0.0
        self.withheld = Withheld()

    def saw(self, norm: float) -> None:
        """A single step's gradient has this norm."""
        if isfinite(norm):
            self._seen += 1
            self._mean += (norm - self._mean) / min(self._seen, LAST)

    def fires(self, norm: float) -> bool:
        """Whether a sum of this norm is large enough. One that is not finite is for the store to judge."""
        return not (isfinite(norm) and norm < self._share * self._mean)

    @property
    def full(self) -> bool:
        """Whether no further gradient may be added."""
        return self.withheld.steps >= self._most

    @property
    def standing(self) -> tuple[int, float]:
        """What it goes on from, for a checkpoint."""
        return self._seen, self._mean

    def go_on(self, standing: tuple[int, float]) -> None:
        """Go on from there."""
        self._seen, self._mean = standing


def norm_of(gradients: Sequence[Tensor]) -> float:
    """Of all of them together; 16-bit numbers are squared in 32 bits."""
    wide = [each if each.dtype == torch.float64 else each.float() for each in gradients]
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x).double() for x in wide])))
