"""Trained weights as a few long pieces, each with a torch optimizer of its own.

An optimizer of many small tensors is busy with counting them. An element-wise one does not care
where one parameter ends and the next begins, so it may as well run over their flat memory (the
padding between them is zero and stays so). Large memory is cut into pieces of a fixed size, so that
several threads can share them and the result does not depend on how many threads there are. A piece is
a whole number of aligned blocks: kernels treat the rest of a vector otherwise, and may differ in the
last bit there, so that the result would depend on where memory is cut.

Only while every parameter has a gradient in every push, and so all have taken the same number of
steps. Checkpoints, and pushes that lack some parameter's gradient, see one state per parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor

from paceline.store.kernels import step_of
from paceline.store.layout import ALIGN, Layout, Slot
from paceline.store.optimizers import (
    GroupSettings,
    OptimizerGroup,
    OptimizerSpec,
    apply_settings,
    build_optimizer,
)

ELEMENTWISE = frozenset(
    "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD".split()  # noqa: SIM905
)
SIZE = 1 << 19
"""Elements of a piece: two megabytes of float32, worth an optimizer of its own, and kept by the cache."""

State = dict[str, Any]


class Piece:
    """Neighbouring trained weights of one dtype and one parameter group."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Tensor, region: int, start: int) -> None:
        self.optimizer = optimizer
        self._step = step_of(optimizer)
        self.weights = weights
        self.region = region
        self.span = slice(start, start + weights.numel())
        """Its place in its region's flat vector."""
        self._set: tuple[GroupSettings, float] | None = None
        """What the optimizer's group has."""

    def step(self, gradient: Tensor, settings: GroupSettings, scale: float) -> None:
        """Update these weights with their part of the gradients."""
        self.weights.grad = gradient
        if self._set != (settings, scale):
            apply_settings(self.optimizer, [settings])
            self.optimizer.param_groups[0]["lr"] *= scale
            self._set = settings, scale
        self._step(self.optimizer)


class Stretch:
    """All trained parameters of one dtype and one group that lie side by side."""

    def __init__(self, group: int, region: int, slots: list[tuple[int, Slot, int]]) -> None:
        self.group = group
        self.region = region
        self.slots = slots
        """Index among the trained parameters, slot, first element in the region."""
        _, last, first = slots[-1]
        self._width = ALIGN * prod(last.shape) // last.size_bytes
        self.start, self.stop = slots[0][2], _up(first + prod(last.shape), self._width)
        self.pieces: list[Piece] = []

    def cut(self, name: str, settings: GroupSettings, weights: Tensor) -> None:
        """Make pieces of the region's weights, each with an optimizer of that kind."""
        size = _up(SIZE, self._width)
        for start in range(self.start, self.stop, size):
            part = weights[start : min(start + size, self.stop)]
            optimizer = build_optimizer(
                OptimizerSpec(name, (OptimizerGroup((0,), settings),)), [part], fast=True
            )
            self.pieces.append(Piece(optimizer, part, self.region, start))

    def take(self, states: Sequence[State]) -> bool:
        """Put the parameters' states together; False if they have not gone the same way."""
        keys = states[0].keys()
        if any(state.keys() != keys for state in states):
            return False
        merged = {key: self._merged([state[key] for state in states]) for key in keys}
        if any(value is _UNLIKE for value in merged.values()):
            return False
        for piece in self.pieces if merged else ():
            part = slice(piece.span.start - self.start, piece.span.stop - self.start)
            piece.optimizer.state[piece.weights] = {k: _part(v, part) for k, v in merged.items()}
        return True

    def hand_back(self) -> dict[int, State]:
        """Each parameter's own state, by its index among the trained ones."""
        states = [piece.optimizer.state.get(piece.weights, {}) for piece in self.pieces]
        values = {key: [state[key] for state in states] for key in states[0]}
        return {
            index: {key: self._own(parts, slot, first) for key, parts in values.items()}
            for index, slot, first in self.slots
        }

    def _merged(self, values: list[Any]) -> Any:
        """One flat tensor for values that lie beside their parameters; else what is the same for all."""
        first = values[0]
        if isinstance(first, Tensor) and first.dim():
            flat = first.new_zeros(self.stop - self.start)
            for value, (_, slot, place) in zip(values, self.slots, strict=True):
                _view(flat, slot, place - self.start).copy_(value)
            return flat
        return first if all(value == first for value in values) else _UNLIKE

    def _own(self, parts: list[Any], slot: Slot, first: int) -> Any:
        """A copy of a parameter's own: what lies beside the weights from all pieces, the rest is the same."""
        value = parts[0]
        if not isinstance(value, Tensor) or not value.dim():
            return value.clone() if isinstance(value, Tensor) else value
        stop = first + prod(slot.shape)
        flat = value.new_empty(stop - first)
        for piece, part in zip(self.pieces, parts, strict=True):
            start, end = max(first, piece.span.start), min(stop, piece.span.stop)
            if start < end:
                there = slice(start - piece.span.start, end - piece.span.start)
                flat[start - first : end - first].copy_(part[there])
        return _view(flat, slot, 0)


class Pieces:
    """All pieces of a model."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, flats: Sequence[Tensor]) -> None:
        self._stretches = _stretches(layout, spec)
        for stretch in self._stretches:
            stretch.cut(spec.name, spec.groups[stretch.group].settings, flats[stretch.region])
        self.all = [(stretch.group, piece) for stretch in self._stretches for piece in stretch.pieces]
        """With the parameter group of each."""

    def cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Memory of the same shape as the weights, in the same pieces."""
        return [flats[piece.region][piece.span] for _, piece in self.all]

    @staticmethod
    def suit(layout: Layout, spec: OptimizerSpec) -> bool:
        """Whether this optimizer and these parameters can be treated so."""
        return spec.name in ELEMENTWISE and all(slot.shape and slot.size_bytes for slot in layout.trained)

    def take(self, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> bool:
        """Go on from an optimizer over single parameters, if its state allows."""
        states = [optimizer.state.get(parameter, {}) for parameter in trained]
        return all(stretch.take([states[i] for i, _, _ in stretch.slots]) for stretch in self._stretches)

    def hand_back(self, optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> None:
        """Let an optimizer over single parameters go on from here."""
        for stretch in self._stretches:
            for index, state in stretch.hand_back().items():
                if state:
                    optimizer.state[trained[index]] = state


class CutMemory:
    """Flat memory of the weights' shape, whose views by piece are made once."""

    def __init__(self, flats: list[Tensor]) -> None:
        self.flats = flats
        self._cut: tuple[Pieces, list[Tensor]] | None = None

    def in_pieces(self, pieces: Pieces) -> list[Tensor]:
        """The part of every piece."""
        if self._cut is None or self._cut[0] is not pieces:
            self._cut = pieces, pieces.cut(self.flats)
        return self._cut[1]


class WeightCopies:
    """Memories that hold weights, the store's own and workers': views of each are made once, and forgotten
    with its tensor."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._known: dict[int, tuple[weakref.ref[Tensor], CutMemory]] = {}

    def of(self, segment: Tensor) -> CutMemory:
        """The views of a memory."""
        known = self._known.get(id(segment))
        if known is not None and known[0]() is segment:
            return known[1]
        number, regions = id(segment), self._layout.regions
        memory = CutMemory([region.flat(segment, region.weights) for region in regions])
        self._known[number] = weakref.ref(segment, partial(self._forget, number)), memory
        return memory

    def _forget(self, number: int, gone: weakref.ref[Tensor]) -> None:
        """The memory is gone; another may have its number by now."""
        if number in self._known and self._known[number][0] is gone:
            del self._known[number]


_UNLIKE = object()


def _up(elements: int, width: int) -> int:
    """The next multiple of a width."""
    return -(-elements // width) * width


def _stretches(layout: Layout, spec: OptimizerSpec) -> list[Stretch]:
    group_of = {index: g for g, group in enumerate(spec.groups) for index in group.parameters}
    placed = [(index, slot, *_place(layout, slot)) for index, slot in enumerate(layout.trained)]
    runs = groupby(placed, key=lambda item: (group_of[item[0]], item[2]))
    return [
        Stretch(group, region, [(index, slot, first) for index, slot, _, first in members])
        for (group, region), members in runs
    ]


def _place(layout: Layout, slot: Slot) -> tuple[int, int]:
    """The region a trained parameter lies in, and its first element there."""
    for number, region in enumerate(layout.regions):
        ahead = slot.offset - region.weights
        if 0 <= ahead < region.size_bytes:
            return number, ahead * prod(slot.shape) // slot.size_bytes
    raise AssertionError(f"{slot.name} lies in no region")


def _view(flat: Tensor, slot: Slot, first: int) -> Tensor:
    """A parameter's part of a flat vector, in its own shape and strides."""
    return flat[first : first + prod(slot.shape)].as_strided(slot.shape, slot.stride)


def _part(value: Any, part: slice) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[part] if value.dim() else value.clone()
