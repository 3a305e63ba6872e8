"""Where a peer's vectors lie in its memories, byte by byte: what has to travel if those are on two hosts."""

from __future__ import annotations

from typing import NamedTuple

from paceline.protocols.core.parts import Part
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout
from paceline.store.replicas import BUFFERS, GRADIENTS, LENT, PARAMETERS, is_buffers

SEGMENT, WEIGHTS, COMMON, OWN, INITIAL, STAGED, FIRST_LENT = range(7)
"""The memories of a worker, by the number they have on the wire: those it is given, in the order it is, what
it begins with, where compressed vectors wait to be taken apart, and those it lends."""
MOST_LENT = 128
"""Memories that one worker may lend."""


def lent_at(place: int) -> int:
    """The memory that a place lies in which a worker lends."""
    return FIRST_LENT + (place - LENT) // 2


class MemoryStretch(NamedTuple):
    """A piece of one memory, in bytes."""

    memory: int
    start: int
    stop: int


class Places:
    """Those of one model."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._cut = cut_of(layout)
        self.tensors = len(layout.trained)

    def of(self, place: int, part: Part | None = None) -> list[MemoryStretch]:
        """What lies in a place, or that of it which belongs to some tensors."""
        if place == BUFFERS:
            return self._buffers(SEGMENT, 0)
        if place in (PARAMETERS, GRADIENTS):
            return self._vector(WEIGHTS if place == PARAMETERS else SEGMENT, part)
        return self.answer(lent_at(place), place, part)

    def answer(self, memory: int, like: int, part: Part | None = None) -> list[MemoryStretch]:
        """Where in a memory for answers a vector goes that is like those of a place."""
        if is_buffers(like):
            return self._buffers(memory, self._layout.weights_bytes)
        return self._vector(memory, part)

    def replica(self, model: int) -> list[MemoryStretch]:
        """A whole replica: parameters, buffers, and what stands for it, if that lies elsewhere."""
        stretches = self.of(PARAMETERS) + self.of(BUFFERS)
        return stretches if model == PARAMETERS else stretches + self.of(model)

    def _buffers(self, memory: int, base: int) -> list[MemoryStretch]:
        layout = self._layout
        return [MemoryStretch(memory, base + layout.gradient_end, base + layout.segment_bytes)]

    def _vector(self, memory: int, part: Part | None) -> list[MemoryStretch]:
        """Gradients lie in a segment, everything else as the weights do."""
        regions = self._layout.regions
        starts = [each.gradients if memory == SEGMENT else each.weights for each in regions]
        if part is None:
            return [
                MemoryStretch(memory, start, start + each.size_bytes)
                for start, each in zip(starts, regions, strict=True)
            ]
        return [
            MemoryStretch(memory, starts[flat] + start, starts[flat] + stop)
            for flat, start, stop in self._cut.in_bytes(part)
        ]
