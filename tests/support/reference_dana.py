"""DANA-Zero written down naively: whole vectors, the sum taken anew each time. What ours is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.trace.events import AnyEvent, Decided, Evaluated, WorkerJoined, WorkerLeft

Positions = Iterable[int]


@dataclass
class ReferenceDana:
    """Weights, and one momentum per worker."""

    weights: Tensor
    lr: float
    momentum: float
    weight_decay: float = 0.0
    own: dict[int, Tensor] = field(default_factory=dict)
    one: float = 0.0
    asleep: set[int] = field(default_factory=set)

    def step(self, parts: Sequence[tuple[int, Tensor, float]], scale: float, one: float) -> None:
        """Gradients with their shares, each through its own worker's momentum."""
        way, self.one = torch.zeros_like(self.weights), one
        for worker, gradient, share in parts:
            before = self.own.get(worker, torch.zeros_like(self.weights))
            self.own[worker] = self.momentum * before + gradient + self.weight_decay * self.weights
            way += share * self.own[worker]
        self.weights = self.weights - self.lr * scale * way

    def ahead(self) -> Tensor:
        """What a released worker reads."""
        return self.weights - self.lr * self.one * self.momentum * self.total()

    def total(self) -> Tensor:
        """The momenta of all who compute."""
        awake = [own for worker, own in self.own.items() if worker not in self.asleep]
        return sum(awake, torch.zeros_like(self.weights))

    def forget(self, worker: int) -> None:
        self.own.pop(worker, None)


class Caught(torch.optim.SGD):
    """Keeps the gradient that it is to step with, and takes no step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.gradient = torch.zeros(0)

    def step(self, closure: Any = None) -> None:
        owned = [p for group in self.param_groups for p in group["params"]]
        self.gradient = torch.cat([p.grad.flatten() for p in owned])


class Retold:
    """A recorded run carried out again by the reference: only its trace is used, and its data."""

    def __init__(self, case: Any, samples: int, weights: dict[str, Tensor] | None = None) -> None:
        """`weights`: where it began, if not with the case's own."""
        self._model, optimizer = case.build()
        self._case, (self._x, self._y) = case, case.samples(samples)
        if weights is not None:
            self._model.load_state_dict(weights)
        group = optimizer.param_groups[0]
        start = nn.utils.parameters_to_vector(self._model.parameters()).detach()
        self.dana = ReferenceDana(start, group["lr"], group["momentum"], group["weight_decay"])
        self._read: dict[int, Tensor] = {}
        self._held: list[tuple[int, Tensor, int]] = []
        self._active: set[int] = set()
        self._fresh: set[int] = set()
        self.seen: dict[int, float] = {}
        """The sum of the weights by version."""

    def tell(self, trace: Iterable[AnyEvent]) -> None:
        """Everything that happened, in order."""
        for event in trace:
            match event:
                case WorkerJoined():
                    self._active.add(event.worker)
                    self.dana.asleep.discard(event.worker)
                    self._fresh.add(event.worker)
                    for worker in self._fresh:  # those who begin together are told when all are there
                        self._read[worker] = self.dana.ahead()
                case WorkerLeft():
                    self._active.discard(event.worker)
                    self.dana.asleep.add(event.worker)
                    if event.reason not in ("away", "stopped"):
                        self.dana.forget(event.worker)
                case Decided():
                    self._decided(event)
                case Evaluated():
                    self._read[event.worker] = self.dana.ahead()

    def gradient(self, at: Tensor, positions: Positions) -> Tensor:
        """What a worker computes."""
        nn.utils.vector_to_parameters(at.clone(), self._model.parameters())
        self._model.zero_grad()
        chosen, caught = list(positions), Caught(self._model)
        self._case.iteration(self._model, caught, self._x[chosen], self._y[chosen])
        return caught.gradient

    def _decided(self, event: Decided) -> None:
        one = 1 / max(len(self._active), 1)
        self._fresh.clear()
        if event.pushed is not None:
            self.dana.asleep.add(event.pushed)
            positions = [at for _, first, count in event.work for at in range(first, first + count)]
            gradient = self.gradient(self._read[event.pushed], positions)
            if event.fate == "apply":
                self.dana.step([(event.pushed, gradient, 1.0)], event.lr_scale, one)
            elif event.fate == "hold":
                self._held.append((event.pushed, gradient, len(positions)))
        if event.flush is not None:
            self._flush(event, one)
        self.seen[event.version] = float(self.dana.weights.sum())
        self.dana.asleep -= set(event.release)
        for rank in event.release:
            self._read[rank] = self.dana.ahead()

    def _flush(self, event: Decided, one: float) -> None:
        total = sum(count for _, _, count in self._held)
        parts = [(rank, gradient, count / total) for rank, gradient, count in sorted(self._held, key=_rank)]
        whole = event.flush == "mean"
        scale = 1.0 if whole else len(parts) * one
        self.dana.step(parts, scale, scale / len(parts))
        self._held = []


def _rank(held: tuple[int, Tensor, int]) -> int:
    return held[0]
