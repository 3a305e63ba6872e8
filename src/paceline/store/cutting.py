"""Where the tensors of a model begin and end in a flat vector, so that some of them can be handled alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.protocols.core.parts import Part
from paceline.store.layout import Layout
from paceline.store.vector import FlatVector

Parts = Sequence[Tensor]


class TensorSpan(NamedTuple):
    """One tensor's place: in which flat part of a vector, from which element to which."""

    flat: int
    start: int
    stop: int
    size_bytes: int


class Cut:
    """The trained tensors of a model, in order."""

    def __init__(self, spans: Sequence[TensorSpan], widths: Sequence[int] = ()) -> None:
        """`widths`: bytes of an element in each flat part of a vector."""
        self._spans, self._widths = tuple(spans), tuple(widths)
        self.sizes = tuple(span.size_bytes for span in spans)
        """Bytes of each."""
        self._runs: dict[tuple[int, ...], list[TensorSpan]] = {}

    def pieces(self, parts: Parts, part: Part | None) -> list[Tensor]:
        """The flat pieces that a part of a vector consists of; None: all there is."""
        if part is None:
            return list(parts)
        return [parts[run.flat][run.start : run.stop] for run in self._runs_of(part)]

    def in_bytes(self, part: Part) -> list[tuple[int, int, int]]:
        """The same as numbers: in which flat part of a vector, from which byte to which."""
        return [
            (run.flat, run.start * self._widths[run.flat], run.stop * self._widths[run.flat])
            for run in self._runs_of(part)
        ]

    def _runs_of(self, part: Part) -> list[TensorSpan]:
        if part.tensors not in self._runs:
            self._runs[part.tensors] = self._joined(part)
        return self._runs[part.tensors]

    def _joined(self, part: Part) -> list[TensorSpan]:
        """Neighbours as one run, with the padding in between."""
        runs: list[TensorSpan] = []
        last = None
        for tensor in part.tensors:
            span = self._spans[tensor]
            if last is not None and tensor == last + 1 and runs[-1].flat == span.flat:
                runs[-1] = runs[-1]._replace(stop=span.stop)
            else:
                runs.append(span)
            last = tensor
        return runs

    def scores(self, one: FlatVector, other: FlatVector, part: Part) -> dict[int, float]:
        """Per tensor of a part, the mean of |one times other| over its elements."""
        return {tensor: self._score(one, other, self._spans[tensor]) for tensor in part.tensors}

    def _score(self, one: FlatVector, other: FlatVector, span: TensorSpan) -> float:
        a, b = (each.parts[span.flat][span.start : span.stop] for each in (one, other))
        if a.dtype in (torch.bfloat16, torch.float16):
            a, b = a.float(), b.float()
        return float(torch.dot(a.abs(), b.abs())) / max(1, span.stop - span.start)

    def copy(self, source: FlatVector, target: FlatVector, part: Part | None) -> None:
        """Write these tensors of one vector to another."""
        pairs = zip(self.pieces(source.parts, part), self.pieces(target.parts, part), strict=True)
        for mine, theirs in pairs:
            theirs.copy_(mine)

    def length(self, vector: FlatVector, part: Part | None) -> float:
        """The norm of a part of a vector."""
        if vector.norm is not None:
            return vector.norm
        pieces = FlatVector(self.pieces(vector.parts, part))
        return math.sqrt(pieces.dot(pieces))

    def others(self, part: Part | None) -> frozenset[int]:
        """The tensors that are not in a part."""
        return frozenset() if part is None else frozenset(range(len(self._spans))).difference(part.tensors)


def cut_of(layout: Layout) -> Cut:
    """The trained tensors as a layout places them."""
    spans = []
    widths = [getattr(torch, region.dtype.removeprefix("torch.")).itemsize for region in layout.regions]
    for slot in layout.trained:
        assert slot.gradient is not None
        flat = next(i for i, region in enumerate(layout.regions) if region.dtype == slot.dtype)
        count = math.prod(slot.shape)
        start = (slot.gradient - layout.regions[flat].gradients) // widths[flat]
        spans.append(TensorSpan(flat, start, start + count, slot.size_bytes))
    return Cut(spans, widths)


def blank(layout: Layout) -> tuple[FlatVector, list[Tensor]]:
    """A vector like the parameters, all zeros, and where each of them lies in it."""
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    flats = [region.flat(memory, region.weights) for region in layout.regions]
    return FlatVector(flats), [slot.view(memory, slot.offset) for slot in layout.trained]
