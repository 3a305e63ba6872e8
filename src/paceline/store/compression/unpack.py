"""Compressed vectors at either end of a wire: how they are taken apart and added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.protocols.core.parts import Part
from paceline.protocols.rules.compression import parse_compression
from paceline.store.compression.codecs import matrices
from paceline.store.compression.wire_form import Expected, read
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout
from paceline.store.replicas import Parts, add_in_turn, parameter_parts

Bytes = bytearray | memoryview


class Unpacker:
    """For vectors of one model, compressed in one way."""

    def __init__(self, layout: Layout, compress: str) -> None:
        how = parse_compression(compress)
        self._layout, self._cut = layout, cut_of(layout)
        self._matrices = matrices(layout, int(how.amount or 0)) if how.name == "powersgd" else ()

    @property
    def longest_bytes(self) -> int:
        """More than this no vector comes to: then it is sent as it is."""
        return self._layout.gradient_bytes

    def open(self, packed: Bytes, into: Parts, part: Part | None) -> None:
        """Take a vector apart, or some tensors of one; refuses what is none."""
        pieces = self._cut.pieces(into, part)
        found = self._matrices if part is None and self._matrices else [()] * len(pieces)
        expected = [Expected(piece, inside) for piece, inside in zip(pieces, found, strict=True)]
        read(torch.frombuffer(packed, dtype=torch.uint8), expected)

    def parts(self, memory: memoryview) -> list[Tensor]:
        """The vector like the parameters that lies in a memory for such."""
        return parameter_parts(self._layout, torch.frombuffer(memory, dtype=torch.uint8))

    def add_up(self, terms: Sequence[tuple[Bytes, float]], into: Parts, part: Part | None) -> None:
        """The weighted sum of compressed vectors, to the bits that `Summing` arrives at."""
        blank = [torch.zeros_like(each) for each in into]

        def opened() -> Iterator[tuple[Parts, float]]:
            for packed, share in terms:
                self.open(packed, blank, part)
                yield self._cut.pieces(blank, part), share

        add_in_turn(opened(), self._cut.pieces(into, part))
