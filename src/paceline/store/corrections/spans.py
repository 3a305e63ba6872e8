"""The trained weights as spans of flat memory: each of one parameter group, small enough for the cache."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.store.layout import ALIGN, Layout, Slot
from paceline.store.optimizers import OptimizerSpec

SIZE = 1 << 19
"""Elements: two megabytes of float32."""


class Span(NamedTuple):
    """A part of a region's flat vector. It begins on a boundary and has the padding after its last tensor."""

    group: int
    region: int
    part: slice


class Vectors:
    """A vector beside the gradients, zero at first."""

    def __init__(self, layout: Layout) -> None:
        memory = torch.zeros(layout.segment_bytes, dtype=torch.uint8)
        self.flats: list[Tensor] = [region.flat(memory, region.gradients) for region in layout.regions]
        self.views: list[Tensor] = layout.gradient_views(memory)

    def part(self, span: Span) -> Tensor:
        """What lies in a span."""
        return self.flats[span.region][span.part]


def spans(layout: Layout, spec: OptimizerSpec, missing: Collection[int] = ()) -> list[Span]:
    """All trained parameters but the missing ones; neighbours of a group are one, cut by size."""
    group_of = {index: number for number, group in enumerate(spec.groups) for index in group.parameters}
    joined: list[Span] = []
    for index, slot in enumerate(layout.trained):
        if index in missing or not slot.size_bytes:
            continue
        region, first, stop = _place(layout, slot)
        span = Span(group_of[index], region, slice(first, stop))
        if joined and joined[-1][:2] == span[:2] and joined[-1].part.stop == first:
            span = Span(span.group, region, slice(joined.pop().part.start, stop))
        joined.append(span)
    return [piece for span in joined for piece in _cut(span)]


def _cut(span: Span) -> Iterator[Span]:
    first, stop = span.part.start, span.part.stop
    for start in range(first, stop, SIZE):
        yield span._replace(part=slice(start, min(start + SIZE, stop)))


def _place(layout: Layout, slot: Slot) -> tuple[int, int, int]:
    """The region of a parameter; its first element there, and where its padding ends."""
    for number, region in enumerate(layout.regions):
        if region.weights <= slot.offset < region.weights + region.size_bytes:
            first, width = (slot.offset - region.weights) // region.item_bytes, ALIGN // region.item_bytes
            return number, first, -(-(first + prod(slot.shape)) // width) * width
    raise AssertionError(f"{slot.name} lies in no region")
