"""A store that only adds: what a worker's own optimizer has changed goes into the weights as it is.

Ho et al. (NIPS 2013): workers compute additive increments, and the server adds them up. A worker pushes its
weights *after* its step. The store still has what it handed out to this worker, so it knows the difference.
The difference itself would be rounded once more: where nobody else has moved a weight meanwhile, the sum has
to be what the worker has, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from paceline.store.layout import Layout
from paceline.store.optimizers import OptimizerGroup, OptimizerSpec
from paceline.store.parameters import CHUNK, Gradients, ParameterStore

WorkerMemory = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain values of an optimizer, under `number.name`."""


class IncrementPiece(NamedTuple):
    """A piece of everything that an addition is about."""

    weights: Tensor
    stepped: Tensor
    read: Tensor
    copies: tuple[Tensor, ...]


class AddingStore(ParameterStore):
    """Weights of one run whose workers step by themselves."""

    applies: ClassVar[str] = "increments"

    def __init__(self, layout: Layout, weights: Tensor, stepped_by: str) -> None:
        """`stepped_by`: the class of the workers' optimizers, for checkpoints."""
        super().__init__(layout, _unused(layout), weights, fast=False)
        self._stepped_by = stepped_by
        self.told: dict[int, WorkerMemory] = {}
        """What workers' optimizers remember, as they told for the next checkpoint."""
        self._ahead: dict[int, WorkerMemory] = {}
        """The same of workers whose push is still to come."""
        self.found: dict[int, WorkerMemory] = {}
        """What they remembered by the checkpoint that the run goes on from."""

    @property
    def stepped_by(self) -> str:
        """The class of the workers' optimizers."""
        return self._stepped_by

    def export(self) -> WorkerMemory:
        """What the workers' optimizers remember, as far as told."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {}
        for worker, (some, others) in self.told.items():
            tensors |= {f"{worker}/{name}": tensor for name, tensor in some.items()}
            values |= {f"{worker}/{name}": value for name, value in others.items()} | {f"{worker}/": True}
        return tensors, values

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Keep for each worker what `export` gave, until it asks."""
        self.found = {int(name[:-1]): ({}, {}) for name in values if name.endswith("/")}
        for worker, (some, others) in self.found.items():
            begin = f"{worker}/"
            some |= {name.removeprefix(begin): t for name, t in tensors.items() if name.startswith(begin)}
            others |= {name.removeprefix(begin): v for name, v in values.items() if name.startswith(begin)}
            del others[""]

    def forget(self, worker: int) -> None:
        """A worker has left, and its optimizer with it."""
        self.told.pop(worker, None)
        self._ahead.pop(worker, None)

    def tell(self, worker: int, memory: WorkerMemory, ahead: bool) -> None:
        """A worker's optimizer remembers this, now or, `ahead`, as soon as its next push is here: until then
        a checkpoint must not have it."""
        (self._ahead if ahead else self.told)[worker] = memory

    def pushed(self, worker: int) -> None:
        """A push is here: what its worker told with it counts, and what it told before does no more."""
        self.told.pop(worker, None)
        if worker in self._ahead:
            self.told[worker] = self._ahead.pop(worker)

    def add(self, stepped: Gradients, read: Tensor, copies: Sequence[Tensor] = ()) -> None:
        """Add what a worker has changed: its weights after its step, less those it `read` in this memory.

        The sum goes into the `copies` as well, for sleeping workers; `read` may be one of them.
        """
        self._lanes.map(_add, self._cut(stepped, read, copies))

    def _cut(self, stepped: Gradients, read: Tensor, copies: Sequence[Tensor]) -> list[IncrementPiece]:
        memories = [self._flats, stepped.flats, self._regions(read), *map(self._regions, copies)]
        pieces = []
        for region in zip(*memories, strict=True):
            for row in zip(*(flat.split(CHUNK) for flat in region), strict=True):
                pieces.append(IncrementPiece(row[0], row[1], row[2], row[3:]))
        return pieces


def _add(piece: IncrementPiece) -> None:
    weights, stepped, read, copies = piece
    untouched = weights == read
    weights.add_(stepped - read)
    torch.where(untouched, stepped, weights, out=weights)
    for copy in copies:
        copy.copy_(weights)


def _unused(layout: Layout) -> OptimizerSpec:
    """What a store is built with that never steps."""
    everything = tuple(range(len(layout.trained)))
    return OptimizerSpec("SGD", (OptimizerGroup(everything, {"lr": 1.0}),))
