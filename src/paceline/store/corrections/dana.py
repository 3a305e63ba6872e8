"""DANA: a momentum per worker, and weights handed out as a look-ahead.

Paper: Hakimi, Barkai, Gabel, Schuster, "Taming Momentum in a Distributed Asynchronous Environment", 2019,
arXiv 1907.11612 (DANA-Zero).

A momentum that all pushes share carries the weights along old steps of everybody, away from where gradients
under way were computed. Here each worker i has its own, v_i = m v_i + g, and its push moves w by lr v_i. Who
is released reads w - lr m s, with s the sum of the v of all who compute: where these momenta will have
brought the weights when its gradient arrives. `lr` is what one push counts. Only a computing worker ever sees
the look-ahead. Who waits pushes nothing, and its momentum brings the weights nowhere meanwhile.

Invariants: s is the sum of the v of all who compute; who leaves takes its v along, and it is dropped. One
worker is Nesterov's momentum. Equal shares of all workers in one flush are one step of a common momentum.

A flush is a push of each of its gradients at the same moment: every one goes through its own worker's
momentum, and counts with its share in the flush.

Where we differ: the paper has SGD alone. For Adam it is the first moment that is per worker (bias-corrected
by that worker's own pushes); the second is shared. It decays by beta2 per gradient from *every* worker, so
one push of N workers decays it by the N-th root. NAdam is Adam here: its look-ahead is what workers are
given, and its `momentum_decay` is not used. Bias is corrected by pushes, not by parameter, which matters only
in the first steps of a parameter whose gradient is missing at times.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.store.optimizers import GroupSettings

ADAMS = ("Adam", "AdamW", "NAdam")


class DanaPush(NamedTuple):
    """One gradient in a step: a piece of it, the same piece of its worker's momentum, what it counts."""

    worker: int
    own: Tensor
    gradient: Tensor
    share: float


class Extent(NamedTuple):
    """How far a step goes: the factor on the learning rate, and on gradients (clipping)."""

    scale: float
    factor: float


class Momentum(Protocol):
    """Keeps one momentum per worker."""

    memory: tuple[str, ...]
    """Names of the vectors that all workers share, beside the sum."""

    def begin(self, workers: Sequence[int], settings: list[GroupSettings], one: float, active: int) -> None:
        """A step of these workers' gradients begins. `one`: what a single push counts in this run."""
        ...

    def step(
        self,
        group: int,
        settings: GroupSettings,
        weights: Tensor,
        shared: dict[str, Tensor],
        pushes: Sequence[DanaPush],
        extent: Extent,
    ) -> None:
        """Move a piece of the weights."""
        ...

    def ahead(
        self, group: int, weights: Tensor, total: Tensor, shared: dict[str, Tensor], out: Tensor
    ) -> None:
        """Where the momenta of all will bring the weights."""
        ...

    def weight(self, worker: int, group: int) -> float:
        """The factor with which a worker's momentum is in the sum."""
        ...

    def forget(self, worker: int) -> None:
        """The worker is gone."""
        ...

    def begin_at(
        self, steps: Sequence[float], settings: Sequence[GroupSettings], workers: Collection[int]
    ) -> None:
        """All have taken so many steps, by group, and these workers are there."""
        ...

    def state(self) -> dict[str, Any]:
        """What is not a vector, for a checkpoint."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


class DanaSGD:
    """For SGD with momentum, Nesterov's or not: the look-ahead makes it Nesterov's."""

    memory: tuple[str, ...] = ()

    def __init__(self, groups: int) -> None:
        self._reach = [0.0] * groups
        """How far ahead, in multiples of the sum, by parameter group."""

    def begin(self, workers: Sequence[int], settings: list[GroupSettings], one: float, active: int) -> None:
        """Look ahead by the learning rate and momentum of now."""
        self._reach = [group["lr"] * one * group["momentum"] for group in settings]

    def step(
        self,
        group: int,
        settings: GroupSettings,
        weights: Tensor,
        shared: dict[str, Tensor],
        pushes: Sequence[DanaPush],
        extent: Extent,
    ) -> None:
        """Each through its own momentum, then all together."""
        rate, sign = settings["lr"] * extent.scale, -1.0 if settings.get("maximize") else 1.0
        way = None if len(pushes) == 1 else torch.zeros_like(weights)
        for _, own, gradient, share in pushes:
            own.mul_(settings["momentum"]).add_(gradient, alpha=sign * extent.factor)
            if settings["weight_decay"]:
                own.add_(weights, alpha=settings["weight_decay"])
            if way is None:
                weights.add_(own, alpha=-rate * share)
            else:
                way.add_(own, alpha=share)
        if way is not None:
            weights.add_(way, alpha=-rate)

    def ahead(
        self, group: int, weights: Tensor, total: Tensor, shared: dict[str, Tensor], out: Tensor
    ) -> None:
        """The weights, moved by everybody's momentum."""
        torch.add(weights, total, alpha=-self._reach[group], out=out)

    def weight(self, worker: int, group: int) -> float:
        """All count alike."""
        return 1.0

    def forget(self, worker: int) -> None:
        """Nothing is kept by worker but its vector."""

    def begin_at(
        self, steps: Sequence[float], settings: Sequence[GroupSettings], workers: Collection[int]
    ) -> None:
        """Steps are not counted."""

    def state(self) -> dict[str, Any]:
        """How far ahead it looks."""
        return {"reach": self._reach}

    def load(self, state: dict[str, Any]) -> None:
        """Look as far as it did."""
        self._reach = list(state["reach"])


SECOND = "second"


class DanaAdam:
    """For Adam, AdamW and NAdam."""

    memory: tuple[str, ...] = (SECOND,)

    def __init__(self, groups: int, decoupled: bool) -> None:
        """`decoupled`: whether weight decay is, unless a group says otherwise."""
        self._decoupled = decoupled
        self._reach = [0.0] * groups
        self.left_of_second = [1.0] * groups
        """What is left of the zeros that the second moment began with, by group."""
        self._first: dict[int, list[float]] = {}
        """The same of each worker's first moment."""
        self._was = self._first
        self._eps = [0.0] * groups
        self._kept = [1.0] * groups

    def begin(self, workers: Sequence[int], settings: list[GroupSettings], one: float, active: int) -> None:
        """Count the gradients in, before any piece is moved."""
        count = len(workers) / max(active, 1)
        self._kept = [group["betas"][1] ** count for group in settings]
        self.left_of_second = [
            left * kept for left, kept in zip(self.left_of_second, self._kept, strict=True)
        ]
        self._reach = [group["lr"] * one * group["betas"][0] for group in settings]
        self._eps = [group["eps"] for group in settings]
        self._was = {worker: self._first.get(worker, [1.0] * len(settings)) for worker in workers}
        self._first = dict(self._first)
        for worker in workers:
            left = self._first.get(worker, [1.0] * len(settings))
            self._first[worker] = [x * group["betas"][0] for x, group in zip(left, settings, strict=True)]

    def step(
        self,
        group: int,
        settings: GroupSettings,
        weights: Tensor,
        shared: dict[str, Tensor],
        pushes: Sequence[DanaPush],
        extent: Extent,
    ) -> None:
        """First moments one by one, the second with what the step is made of."""
        gradients = [self._gradient(settings, weights, push.gradient, extent.factor) for push in pushes]
        mean = gradients[0] if len(pushes) == 1 else torch.zeros_like(weights)
        if len(pushes) > 1:
            for gradient, push in zip(gradients, pushes, strict=True):
                mean.add_(gradient, alpha=push.share)
        kept = self._kept[group]
        shared[SECOND].mul_(kept).addcmul_(mean, mean, value=1 - kept)
        way = self._way(group, settings["betas"][0], pushes, gradients)
        rate = settings["lr"] * extent.scale
        if settings["weight_decay"] and self._is_decoupled(settings):
            weights.mul_(1 - rate * settings["weight_decay"])
        weights.addcdiv_(way, self._root(group, shared[SECOND]), value=-rate)

    def _way(
        self, group: int, beta: float, pushes: Sequence[DanaPush], gradients: Sequence[Tensor]
    ) -> Tensor:
        """The first moments of these pushes, by share; those of one worker one after the other."""
        way = torch.zeros_like(gradients[0])
        left = {worker: was[group] for worker, was in self._was.items()}
        for (worker, own, _, share), gradient in zip(pushes, gradients, strict=True):
            own.lerp_(gradient, 1 - beta)
            left[worker] *= beta
            way.add_(own, alpha=share / (1 - left[worker]))
        return way

    def _gradient(self, settings: GroupSettings, weights: Tensor, gradient: Tensor, factor: float) -> Tensor:
        factor = -factor if settings.get("maximize") else factor
        gradient = gradient if factor == 1.0 else gradient * factor
        if settings["weight_decay"] and not self._is_decoupled(settings):
            gradient = gradient.add(weights, alpha=settings["weight_decay"])
        return gradient

    def _is_decoupled(self, settings: GroupSettings) -> bool:
        return bool(settings.get("decoupled_weight_decay", self._decoupled))

    def _root(self, group: int, second: Tensor) -> Tensor:
        return second.div(1 - self.left_of_second[group]).sqrt_().add_(self._eps[group])

    def ahead(
        self, group: int, weights: Tensor, total: Tensor, shared: dict[str, Tensor], out: Tensor
    ) -> None:
        """The weights, moved by everybody's first moment."""
        if self.left_of_second[group] < 1:
            torch.addcdiv(
                weights, total, self._root(group, shared[SECOND]), value=-self._reach[group], out=out
            )
        else:
            out.copy_(weights)

    def weight(self, worker: int, group: int) -> float:
        """First moments are in the sum without their bias."""
        left = self._first[worker][group] if worker in self._first else 1.0
        return 1 / (1 - left) if left < 1 else 0.0

    def forget(self, worker: int) -> None:
        """A worker that comes back begins anew."""
        self._first.pop(worker, None)

    def begin_at(
        self, steps: Sequence[float], settings: Sequence[GroupSettings], workers: Collection[int]
    ) -> None:
        """As much is left of the zeros as torch's optimizer has after so many steps."""
        groups = list(zip(steps, settings, strict=True))
        first = [group["betas"][0] ** count for count, group in groups]
        self.left_of_second = [group["betas"][1] ** count for count, group in groups]
        self._first = {worker: list(first) for worker in workers}
        self._eps = [group["eps"] for group in settings]

    def state(self) -> dict[str, Any]:
        """What corrects bias, and how far ahead it looks."""
        first = {str(worker): left for worker, left in self._first.items()}
        return {"reach": self._reach, "second": self.left_of_second, "eps": self._eps, "first": first}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with the same bias."""
        self._reach, self.left_of_second, self._eps = (
            list(state[name]) for name in ("reach", "second", "eps")
        )
        self._first = {int(worker): list(left) for worker, left in state["first"].items()}
