"""A store in portions, each held by another host: where they are cut, and what is done to all of them.

A portion is a row of neighbouring trained parameters, with their gradients and optimizer state. It
keeps the places they have in the whole model's memory, so a portion's own layout is the model's with
everything else left out, and one class of store serves a portion and a whole. Large parameters are cut in
slices before (`slices.py`), if the optimizer allows it; the others are whole.

The first portion is the coordinator's. Its store writes down what is done to it (`StepOrder`,
`KeepGradient`, `SumOrder`), in words that name gradients by who pushed them;
whoever holds another portion does the same to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from paceline.errors import ConfigError
from paceline.store.corrections.correction import GradientPart, Stride
from paceline.store.layout import Layout, Region
from paceline.store.optimizers import GroupSettings, OptimizerGroup, OptimizerSpec, adjust
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.pieces import Pieces


class Portion(msgspec.Struct, frozen=True):
    """A row of trained parameters, and where it lies."""

    first: int
    last: int
    """Trained parameters from `first` on, without `last`."""
    weights: tuple[int, int]
    """Bytes of the weights' memory."""
    gradients: tuple[int, int]
    """Bytes of a segment."""


class Pushed(msgspec.Struct, frozen=True, array_like=True):
    """One gradient: who pushed it, and which of its pushes it was."""

    host: int
    lane: int
    number: int


Parts = list[tuple[Pushed, float]]
"""Gradients, each with its factor in a sum."""


class SumOrder(msgspec.Struct, frozen=True, tag="Sum"):
    """Add these up, and tell what that makes of the norm: the next step is theirs."""

    parts: Parts
    aside: bool = False
    """Whether they are needed as they are afterwards."""


class Mend(msgspec.Struct, frozen=True, tag=True):
    """Correct this gradient, which has just come, by the weights that its worker was sent last."""

    pushed: Pushed


class StepEach(msgspec.Struct, frozen=True, tag=True):
    """One step in which every gradient goes through its own worker's momentum."""

    parts: Parts
    workers: list[tuple[int, bool]]
    """Whose they are, and whether these have left."""
    settings: list[GroupSettings]
    stride: Stride


class Forget(msgspec.Struct, frozen=True, tag=True):
    """A worker has left, and its momentum with it."""

    worker: int


class StepOrder(msgspec.Struct, frozen=True, tag="Step"):
    """One optimizer step with the weighted sum of these gradients."""

    parts: Parts
    settings: list[GroupSettings]
    scale: float
    whole: bool
    """Whether no parameter of the whole model lacks a gradient."""
    norm: float | None = None
    """Of the sum, over all portions, if it is to be clipped."""


class KeepGradient(msgspec.Struct, frozen=True, tag="Keep"):
    """Its worker is about to compute: copy this gradient, which waits for a step."""

    pushed: Pushed


class Awake(msgspec.Struct, frozen=True, tag=True):
    """Only these workers compute, or are about to."""

    workers: list[int]


Deed = StepOrder | StepEach | KeepGradient | Mend | Forget | Awake
"""What is done to the first portion, and to the others in the same order."""


def cut(layout: Layout, count: int) -> tuple[Portion, ...]:
    """Portions of about equal bytes, cut between parameters (or slices, if the layout is of those)."""
    trained = layout.trained
    if count > len(trained):
        raise ConfigError(
            f"the store is to lie on {count} hosts, but what is trained is enough for {len(trained)} only. "
            f"Use --store-hosts {max(1, len(trained))} or less."
        )
    begins = [slot.offset for slot in trained] + [_trained_end(layout)]
    bounds = [0]
    for number in range(1, count):
        target = begins[0] + (begins[-1] - begins[0]) * number / count
        possible = range(bounds[-1] + 1, len(trained) - (count - number) + 1)
        bounds.append(min(possible, key=lambda i: abs(begins[i] - target)))
    bounds.append(len(trained))
    return tuple(_portion(layout, first, last) for first, last in pairwise(bounds))


class Used(NamedTuple):
    """What of a worker's memories is used where the store, or the first portion of it, is: from, to."""

    weights: list[tuple[int, int]]
    segment: list[tuple[int, int]]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of weights and of segment."""
        return sum(b - a for a, b in self.weights), sum(b - a for a, b in self.segment)


def used_of(layout: Layout, first: Portion | None) -> Used:
    """By the whole model's layout. All without portions; else what is trained of the first portion, and what
    nobody trains."""
    if first is None:
        return Used([(0, layout.weights_bytes)], [(0, layout.segment_bytes)])
    return Used(
        [first.weights, (_trained_end(layout), layout.weights_bytes)],
        [first.gradients, (layout.gradient_end, layout.segment_bytes)],
    )


def portion_layout(layout: Layout, portion: Portion) -> Layout:
    """The model's layout with the trained parameters of a portion only; the first has what is not trained."""
    trained = tuple(layout.trained[portion.first : portion.last])
    others = tuple(slot for slot in layout.parameters if slot.gradient is None)
    regions = [_within(region, portion) for region in layout.regions]
    return msgspec.structs.replace(
        layout,
        parameters=trained + (others if portion.first == 0 else ()),
        regions=tuple(region for region in regions if region.size_bytes > 0),
        aliases={},
    )


def portion_spec(spec: OptimizerSpec, portion: Portion) -> OptimizerSpec:
    """The optimizer of a portion's parameters; groups keep their numbers."""
    groups = [
        OptimizerGroup(tuple(i - portion.first for i in group.parameters if _has(portion, i)), group.settings)
        for group in spec.groups
    ]
    return OptimizerSpec(spec.name, tuple(groups))


def own_missing(missing: Sequence[int], portion: Portion) -> tuple[int, ...]:
    """Of the parameters without a gradient, those of a portion, as it counts them."""
    return tuple(i - portion.first for i in missing if _has(portion, i))


def to_whole(spec: OptimizerSpec, portion: Portion, named: dict[str, Any]) -> dict[str, Any]:
    """A portion's optimizer state under the names it has in the whole model's."""
    places = _numbers(spec, portion)
    return {f"{places[int(name.split('.', 1)[0])]}.{name.split('.', 1)[1]}": v for name, v in named.items()}


def of_whole(spec: OptimizerSpec, portion: Portion, named: dict[str, Any]) -> dict[str, Any]:
    """The whole model's optimizer state, as far as it is a portion's, under its names there."""
    places = {str(whole): own for own, whole in enumerate(_numbers(spec, portion))}
    split = ((*name.split(".", 1), value) for name, value in named.items())
    return {f"{places[number]}.{key}": value for number, key, value in split if number in places}


class PortionStore(ParameterStore):
    """One portion of the weights, stepped as the whole would be: to the same bits."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, portion: Portion, weights: Tensor) -> None:
        """Layout, optimizer and memory are the whole model's."""
        super().__init__(portion_layout(layout, portion), portion_spec(spec, portion), weights)
        if not Pieces.suit(layout, spec):
            self.step_singly()


class FirstPortion(PortionStore):
    """The coordinator's portion: a store as far as its owner sees, and a record of what is done to it."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, portion: Portion, weights: Tensor) -> None:
        super().__init__(layout, spec, portion, weights)
        self.pushed: dict[Gradients, Pushed] = {}
        """Which gradient lies in which memory now."""
        self.elsewhere: dict[Gradients, list[float]] = {}
        """The squares that make its norm in the other portions."""
        self.others_add_up: Callable[[SumOrder], Callable[[], list[float]]] | None = None
        """Lets the other holders add up as well, if the norm of sums is wanted; then tells their squares."""
        self.done: list[Deed] = []
        """What was done since somebody took it from here."""
        self._sum: tuple[Gradients, Parts] | None = None

    def apply(
        self,
        gradients: Gradients,
        settings: list[GroupSettings],
        scale: float,
        norm: float | None = None,
        clip: float | None = None,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """One optimizer step, here and (by the record) elsewhere."""
        assert clip is None or norm is not None, "the norm over all portions is not known here"
        summed = self._sum is not None and self._sum[0] is gradients  # perhaps in memory of nobody's push
        parts = self._sum[1] if self._sum is not None and summed else [(self.pushed[gradients], 1.0)]
        self._sum = None
        wanted = None if clip is None else norm
        self.done.append(
            StepOrder(parts, adjust(settings, self.adjusted), scale, not gradients.missing, wanted)
        )
        super().apply(gradients, settings, scale, norm, clip, copies)

    def reduce(
        self, parts: Sequence[tuple[Gradients, float]], into: Gradients | None = None
    ) -> tuple[Gradients, float]:
        """The weighted sum of this portion's gradients, to be applied next; its norm here, or everywhere."""
        named = [(self.pushed[gradients], share) for gradients, share in parts]
        wanted = SumOrder(named, aside=into is not None)
        others = self.others_add_up(wanted) if self.others_add_up is not None else list[float]
        total, squares = self.add_up(parts, into)
        self._sum = total, named
        return total, math.sqrt(sum([*squares, *others()]))

    def apply_each(
        self,
        parts: Sequence[GradientPart],
        settings: list[GroupSettings],
        stride: Stride,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """One step of each worker's own momentum, here and elsewhere."""
        self._sum = None
        named = [(self.pushed[_own(part)], part.share) for part in parts]
        workers = [(part.worker, part.gone) for part in parts]
        self.done.append(StepEach(named, workers, adjust(settings, self.adjusted), stride))
        super().apply_each(parts, settings, stride, copies)

    def mend(self, gradients: Gradients, read: Tensor) -> None:
        """Correct a gradient, here and elsewhere."""
        self.done.append(Mend(self.pushed[gradients]))
        super().mend(gradients, read)

    def awake(self, workers: frozenset[int]) -> bool:
        """Who computes, here and elsewhere."""
        if news := super().awake(workers):
            self.done.append(Awake(sorted(workers)))
        return news

    def forget(self, worker: int) -> None:
        """A worker has left, here and elsewhere."""
        if self.corrections is not None:
            self.done.append(Forget(worker))
            super().forget(worker)

    def norm(self, gradients: Gradients) -> float:
        """The norm over all portions."""
        return math.sqrt(sum([*self.squares(gradients), *self.elsewhere.get(gradients, [])]))


def _own(part: GradientPart) -> Gradients:
    assert isinstance(part.gradients, Gradients)
    return part.gradients


def _portion(layout: Layout, first: int, last: int) -> Portion:
    slots = layout.trained
    begin, end = slots[first], slots[last] if last < len(slots) else None
    assert begin.gradient is not None
    if end is None:
        return Portion(
            first, last, (begin.offset, _trained_end(layout)), (begin.gradient, layout.gradient_end)
        )
    assert end.gradient is not None
    return Portion(first, last, (begin.offset, end.offset), (begin.gradient, end.gradient))


def _trained_end(layout: Layout) -> int:
    return max((region.weights + region.size_bytes for region in layout.regions), default=0)


def _within(region: Region, portion: Portion) -> Region:
    """The part of a region that is a portion's."""
    start = max(region.weights, portion.weights[0])
    stop = min(region.weights + region.size_bytes, portion.weights[1])
    return Region(region.dtype, start, region.gradients + start - region.weights, max(0, stop - start))


def _has(portion: Portion, index: int) -> bool:
    return portion.first <= index < portion.last


def _numbers(spec: OptimizerSpec, portion: Portion) -> list[int]:
    """The numbers of a portion's parameters in the whole model's optimizer, in the portion's own order."""
    order = [index for group in spec.groups for index in group.parameters]
    return [place for place, index in enumerate(order) if _has(portion, index)]
