"""Large parameters cut in slices, so that a store can be cut into portions of equal bytes.

An element-wise optimizer does not care where a parameter ends. So a slice, which is a row of a parameter's
elements as they lie in memory, is a trained parameter of its own to whoever holds it. Slices begin
on aligned blocks, where kernels begin anew, so no bit depends on them. A run and its checkpoints know whole
parameters only: here is the way from the state of one to that of the other.

Where a gradient's norm decides (clipping), squares are added up in chunks of a fixed size, and slices end
where chunks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from paceline.store.layout import ALIGN, Layout, Slot
from paceline.store.optimizers import OptimizerSpec
from paceline.store.parameters import CHUNK
from paceline.store.pieces import Pieces

WORTH = 0.05
"""A parameter is cut if that brings a portion nearer to its size by so much of it."""


Named = dict[str, Any]
"""State, under the number of a parameter or slice in its optimizer and a key."""


class Whereabouts(NamedTuple):
    """Whose a slice is, and its elements there."""

    parameter: int
    first: int
    last: int


class Slices:
    """A model and its optimizer, whole and in slices."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, places: Iterable[int] = ()) -> None:
        """`places`: bytes of the weights' memory before which trained parameters are cut."""
        self.whole, self.spec = layout, spec
        self._cut = [_cut_one(slot, sorted(places)) for slot in layout.trained]
        self._at = [0, *_running(len(pieces) for pieces in self._cut)]
        """The first slice of each parameter, among all."""
        others = [slot for slot in layout.parameters if slot.gradient is None]
        self.layout = msgspec.structs.replace(layout, parameters=(*chain.from_iterable(self._cut), *others))
        groups = [msgspec.structs.replace(g, parameters=self._slices_of(g.parameters)) for g in spec.groups]
        self.optimizer = OptimizerSpec(spec.name, tuple(groups))
        self._order = [index for group in spec.groups for index in group.parameters]

    @property
    def origins(self) -> tuple[int, ...]:
        """Which parameter each slice is of; none, if nothing is cut."""
        origins = tuple(index for index, pieces in enumerate(self._cut) for _ in pieces)
        return origins if len(origins) > len(self._cut) else ()

    def _slices_of(self, parameters: Iterable[int]) -> tuple[int, ...]:
        return tuple(i for index in parameters for i in range(self._at[index], self._at[index + 1]))

    def of_whole(self, tensors: Named, values: Named) -> tuple[Named, Named]:
        """The whole model's optimizer state, by slices."""
        return self._apart(tensors), self._apart(values)

    def to_whole(self, tensors: Named, values: Named) -> tuple[Named, Named]:
        """The state of all slices, as the whole model's optimizer has it."""
        return self._joined(tensors), self._joined(values)

    def _apart(self, named: Named) -> Named:
        numbers = self._numbers()
        return {
            f"{number}.{key}": _part(value, self.whole.trained[where.parameter], where)
            for name, value in named.items()
            for whole, key in [name.split(".", 1)]
            for number, where in numbers[int(whole)]
        }

    def _joined(self, named: Named) -> Named:
        keys = {name.split(".", 1)[1]: None for name in named}
        found: Named = {}
        for whole, slices in self._numbers().items():
            slot = self.whole.trained[slices[0][1].parameter]
            for key in keys:
                parts = [named[name] for number, _ in slices if (name := f"{number}.{key}") in named]
                if parts:
                    found[f"{whole}.{key}"] = _together(parts, slot)
        return found

    def _numbers(self) -> dict[int, list[tuple[int, Whereabouts]]]:
        """By the number of a parameter in its optimizer: its slices' numbers, and where they are."""
        numbers: dict[int, list[tuple[int, Whereabouts]]] = {}
        next_one = 0
        for whole, index in enumerate(self._order):
            ends = [0, *_running(prod(piece.shape) for piece in self._cut[index])]
            numbers[whole] = [
                (next_one + at, Whereabouts(index, *ends)) for at, ends in enumerate(pairwise(ends))
            ]
            next_one += len(self._cut[index])
        return numbers


def slices_of(missing: Sequence[int], origins: Sequence[int]) -> tuple[int, ...]:
    """The slices of parameters without a gradient; `origins` as `Slices` has it."""
    gone = frozenset(missing)
    return tuple(i for i, parameter in enumerate(origins) if parameter in gone) if origins else tuple(missing)


def slice_evenly(layout: Layout, spec: OptimizerSpec, count: int, by_chunks: bool = False) -> Slices:
    """Cut so that there can be so many portions of about equal bytes; nothing, if the optimizer needs whole
    parameters. `by_chunks`: only where chunks end."""
    if not Pieces.suit(layout, spec):
        return Slices(layout, spec)
    begin, end = layout.trained[0].offset, max(r.weights + r.size_bytes for r in layout.regions)
    share = (end - begin) / count
    targets = [begin + share * number for number in range(1, count)]
    begins = [*(slot.offset for slot in layout.trained), end]
    places = set()
    for target in targets:
        place = _nearest(layout, target, by_chunks)
        if min(abs(target - x) for x in begins) - abs(target - place) > WORTH * share:
            places.add(place)
    return Slices(layout, spec, places)


def _nearest(layout: Layout, target: float, by_chunks: bool) -> int:
    """The place next to a target where a parameter may be cut."""
    region = next(r for r in layout.regions if target < r.weights + r.size_bytes)
    step, start = (CHUNK * region.item_bytes, -region.gradients) if by_chunks else (ALIGN, 0)
    return _round(target - region.weights, step, start) + region.weights


def _round(place: float, step: int, start: int) -> int:
    return round((place - start) / step) * step + start


def _cut_one(slot: Slot, places: Sequence[int]) -> list[Slot]:
    """A parameter's slices; itself, if no place is within."""
    within = [place for place in places if slot.offset < place < slot.offset + slot.size_bytes]
    if not within:
        return [slot]
    assert slot.gradient is not None
    width, shift = slot.size_bytes // prod(slot.shape), slot.gradient - slot.offset
    return [
        Slot(slot.name, slot.dtype, ((stop - start) // width,), (1,), start, start + shift)
        for start, stop in pairwise([slot.offset, *within, slot.offset + slot.size_bytes])
    ]


def _part(value: Any, slot: Slot, where: Whereabouts) -> Any:
    """What belongs to a slice of what a parameter has: its elements, or a copy of what is one for all."""
    if not isinstance(value, Tensor) or where[1:] == (0, value.numel()):
        return value
    if not value.dim():
        return value.clone()
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.as_strided(slot.shape, slot.stride).copy_(value)
    return flat[where.first : where.last].clone()


def _together(parts: list[Any], slot: Slot) -> Any:
    """The opposite."""
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, Tensor) or not first.dim():
        return first
    return torch.cat(parts).as_strided(slot.shape, slot.stride).contiguous()


def _running(sizes: Iterable[int]) -> list[int]:
    """Sums from the first one on."""
    total, sums = 0, []
    for size in sizes:
        total += size
        sums.append(total)
    return sums
