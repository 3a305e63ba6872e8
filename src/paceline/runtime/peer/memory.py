"""The memories of a peer that the meeting place can read: those it was given, and those it lends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.fabric.segment import Segment
from paceline.store.compression.codecs import Wire
from paceline.store.compression.wire_form import write
from paceline.store.layout import Layout
from paceline.store.replicas import LENT, answer_bytes, answer_parts
from paceline.store.vector import FlatVector

Halves = tuple[FlatVector, FlatVector]
"""Memory for a vector of parameters, and for one of buffers."""


class PeerMemory:
    """One worker's, each part under the number of its place."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout, self._rank = layout, rank
        self._lent: list[Segment] = []
        self._unsent: list[Segment] = []
        self._places: dict[int, int] = {}
        self._scratch: Halves | None = None

    def know(self, parts: Sequence[Tensor], place: int) -> None:
        """These lie in a place."""
        if parts:
            self._places[parts[0].data_ptr()] = place

    def find(self, vector: FlatVector) -> int | None:
        """The place a vector lies in, if it does in any."""
        return self._places.get(vector.parts[0].data_ptr())

    def at(self, vector: FlatVector) -> int:
        """The place a vector lies in."""
        return self._places[vector.parts[0].data_ptr()]

    def place(self, vector: FlatVector, like_parameters: Callable[[FlatVector], bool]) -> int:
        """The place a vector lies in; one that lies in none is copied to memory that is lent."""
        place = self.find(vector)
        if place is not None:
            return place
        scratch = self.scratch(like_parameters(vector))
        scratch[:] = vector
        return self.at(scratch)

    def write(self, pieces: Sequence[tuple[int, Wire]], place: int) -> None:
        """Write a compressed vector to where one lies that is lent."""
        write(pieces, self._lent[(place - LENT) // 2].bytes)

    def scratch(self, like_parameters: bool) -> FlatVector:
        """Lent memory for a vector that lies in none."""
        if self._scratch is None:
            self._scratch = self.lend("vectors")
        return self._scratch[not like_parameters]

    def lent_at(self, start: int) -> Tensor | None:
        """The lent memory that begins there."""
        return next((each.bytes for each in self._lent if each.bytes.data_ptr() == start), None)

    def lend(self, whom: str) -> Halves:
        """Further memory that the meeting place can read; it hears of it with the next word."""
        segment = Segment.create(answer_bytes(self._layout), f"{whom} of rank {self._rank}")
        first = LENT + 2 * len(self._lent)
        self._lent.append(segment)
        self._unsent.append(segment)
        halves = answer_parts(self._layout, segment.bytes)
        for place, parts in enumerate(halves, first):
            self.know(parts, place)
        return FlatVector(halves[0]), FlatVector(halves[1])

    def unsent(self) -> list[Segment]:
        """What was lent since the meeting place last heard of it."""
        unsent, self._unsent = self._unsent, []
        return unsent
