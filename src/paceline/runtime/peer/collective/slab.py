"""Memory of a worker's own for what a collective fabric reduces: few long tensors, whatever the model's are.

A reduction works in place, and what a worker gives away must stay as it is: so a vector is copied here first,
multiplied by its share on the way, which a mean needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.protocols.core.parts import Part
from paceline.store.cutting import cut_of
from paceline.store.layout import Layout
from paceline.store.replicas import parameter_parts

CPU = torch.device("cpu")


class Slab:
    """Room for a vector of parameters, laid out as weights are, and one of buffers, packed."""

    def __init__(self, layout: Layout, buffers: Sequence[Tensor], device: torch.device = CPU) -> None:
        """`buffers` are the parts of a vector of buffers."""
        self.memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8, device=device)
        self._parameters = parameter_parts(layout, self.memory)
        self._packed, self._buffers = pack(buffers)
        self._cut = cut_of(layout)
        self._some: tuple[Part, list[Tensor], list[Tensor]] | None = None

    def parts(self, buffers: bool = False) -> list[Tensor]:
        """The vector's parts."""
        return self._buffers if buffers else self._parameters

    def flats(self, buffers: bool = False, part: Part | None = None) -> list[Tensor]:
        """What travels: one long tensor per dtype, with nothing in it but the tensors of a part."""
        if part is not None:
            return self._of(part)[0]
        return self._packed if buffers else self._parameters

    def fill(
        self, vector: Sequence[Tensor], share: float, buffers: bool = False, part: Part | None = None
    ) -> None:
        """Take a share of a vector. Nothing of one that is not finite is nothing, too."""
        targets = self.parts(buffers) if part is None else self._of(part)[1]
        for piece, target in zip(self._cut.pieces(vector, part), targets, strict=True):
            if share:
                torch.mul(piece, share, out=target)
            else:
                target.zero_()

    def put_back(self, part: Part | None) -> None:
        """Let what travelled of a part take its place among the vector's parts."""
        if part is not None:
            places = self._cut.pieces(self._parameters, part)
            for view, place in zip(self._of(part)[1], places, strict=True):
                place.copy_(view)

    def clear(self, buffers: bool = False, part: Part | None = None) -> None:
        """All zeros."""
        for flat in self.flats(buffers, part):
            flat.zero_()

    def scale(self, factor: float, buffers: bool = False, part: Part | None = None) -> None:
        """Multiply all by the same; nothing to do for 1."""
        for flat in self.flats(buffers, part) if factor != 1.0 else []:
            flat.mul_(factor)

    def _of(self, part: Part) -> tuple[list[Tensor], list[Tensor]]:
        """Memory for the tensors of a part: flat, and piece by piece. Only the last part's is kept."""
        if self._some is None or self._some[0] != part:
            self._some = part, *pack(self._cut.pieces(self._parameters, part))
        return self._some[1:]


def pack(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """New memory for tensors like these: one flat tensor per dtype, and the parts as views of them."""
    sizes: dict[torch.dtype, int] = {}
    starts = []
    for part in parts:
        starts.append(sizes.get(part.dtype, 0))
        sizes[part.dtype] = starts[-1] + part.numel()
    flats = {dtype: torch.zeros(size, dtype=dtype, device=parts[0].device) for dtype, size in sizes.items()}
    views = [flats[part.dtype][at : at + part.numel()] for part, at in zip(parts, starts, strict=True)]
    return list(flats.values()), views
