"""Arithmetic on the memories of peers: means and mixtures, read where they lie, written where wanted.

A worker's vectors lie in *places*, each a list of flat tensors: its parameters, its gradients, its float
buffers, and whatever memory it lends. Nothing is copied in order to be averaged. Sums run in rank order,
chunk by chunk while a chunk is in cache, so they repeat bit for bit, and their norm costs no extra pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import RunError
from paceline.protocols.core.meeting import Turn
from paceline.store.lanes import Lanes
from paceline.store.layout import Layout
from paceline.store.parameters import CHUNK, MANY_THREADS_BYTES

Parts = Sequence[Tensor]
PARAMETERS, GRADIENTS, BUFFERS, LENT = range(4)
"""The places every worker has, and the first of those it lends."""


def parameter_parts(layout: Layout, weights: Tensor) -> list[Tensor]:
    """The trained parameters in a piece of memory laid out as the weights are."""
    return [region.flat(weights, region.weights) for region in layout.regions]


def gradient_parts(layout: Layout, segment: Tensor) -> list[Tensor]:
    """Their gradients in a worker's segment."""
    return [region.flat(segment, region.gradients) for region in layout.regions]


def buffer_parts(layout: Layout, segment: Tensor) -> list[Tensor]:
    """The float buffers in a worker's segment, each as it lies."""
    slots = [
        slot for slot in layout.buffers if getattr(torch, slot.dtype.removeprefix("torch.")).is_floating_point
    ]
    flats = [(segment[slot.offset : slot.offset + slot.size_bytes], slot.dtype) for slot in slots]
    return [flat.view(getattr(torch, dtype.removeprefix("torch."))) for flat, dtype in flats]


def answer_bytes(layout: Layout) -> int:
    """The size of a memory that can hold parameters, and behind them buffers."""
    return layout.weights_bytes + layout.segment_bytes


def answer_parts(layout: Layout, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Both halves of such a memory."""
    behind = memory[layout.weights_bytes :]
    return parameter_parts(layout, memory), buffer_parts(layout, behind)


class Brought(NamedTuple):
    """What a worker came with: where it lies, where the answer goes, which parameters have no part in it;
    whether its memory may be used."""

    place: int
    into: int
    missing: frozenset[int]


class Replica:
    """One worker's memories, as the owner sees them."""

    def __init__(self, layout: Layout, weights: Tensor, segment: Tensor, answers: Tensor) -> None:
        self._layout = layout
        self._places: list[Parts] = [
            parameter_parts(layout, weights),
            gradient_parts(layout, segment),
            buffer_parts(layout, segment),
        ]
        self._answers = answer_parts(layout, answers)
        self._lent: list[Tensor] = []
        self._brought: dict[Turn, Brought] = {}
        self._stood: dict[int, int] = {}
        """Where that lies what it was after so many iterations."""
        self.model = PARAMETERS
        """Where that lies which stands for it."""
        self.stage = 0
        """How far that has come."""
        self.stand_in: Parts | None = None
        """What stands for it instead, if that is kept elsewhere."""

    def lend(self, memory: Tensor) -> None:
        """Further memory of this worker's: two places, one for parameters and one for buffers."""
        self._lent.append(memory)
        self._places += answer_parts(self._layout, memory)

    def lent(self, place: int) -> Tensor:
        """The memory, byte by byte, that a place lies in which it lends."""
        if place < LENT:
            raise RunError(f"place {place} is not one that is lent.")
        return self._lent[(place - LENT) // 2]

    def bring(self, turn: Turn, brought: Brought) -> None:
        """It has come to an operation."""
        self._brought[turn] = brought

    def brought(self, turn: Turn) -> Brought:
        """What it came with."""
        return self._brought[turn]

    def forget(self, turn: Turn) -> None:
        """What it came with was used, and nobody asks for it again."""
        self._brought.pop(turn, None)

    def vector(self, turn: Turn) -> Parts:
        """The vector it came with."""
        return self._places[self._brought[turn].place]

    def stood(self, stage: int, place: int) -> None:
        """That lies there what it was after so many iterations."""
        self._stood[stage] = place

    def needed_from(self, stage: int) -> None:
        """What it was after fewer iterations, nobody asks for."""
        self._stood = {each: place for each, place in self._stood.items() if each >= stage}

    def place_at(self, stage: int) -> int:
        """Where that lies what it was after so many iterations, or after its last if it did fewer."""
        known = [each for each in self._stood if each <= stage]
        return self._stood[max(known)] if known else PARAMETERS

    def at(self, stage: int) -> tuple[Parts, Parts]:
        """What it was then: parameters, and buffers."""
        place = self.place_at(stage)
        return self._places[place], self._places[BUFFERS if place == PARAMETERS else place + 1]

    @property
    def standing(self) -> Parts:
        """What stands for it when the run is evaluated and saved."""
        return self.parts(self.model) if self.stand_in is None else self.stand_in

    def parts(self, place: int) -> Parts:
        """What lies in a place."""
        return self._places[place]

    def answer(self, turn: Turn) -> Parts:
        """Where the answer to what it came for goes: where it asked, else where all its answers go."""
        came = self._brought[turn]
        return self._places[came.into] if came.into else self.answer_like(came.place)

    def answer_like(self, place: int) -> Parts:
        """Where a vector goes that is like those of a place."""
        return self._answers[is_buffers(place)]


def is_buffers(place: int) -> bool:
    """Whether a place holds buffers."""
    return place == BUFFERS or (place >= LENT and (place - LENT) % 2 == 1)


class Summing:
    """Weighted sums over many threads, or one."""

    def __init__(self, fused: bool = True) -> None:
        """`fused`: faster, and to bits that another processor may not arrive at."""
        self._lanes = Lanes()
        self._fused = fused

    def use_cores(self, idle: int, size_bytes: int) -> None:
        """Use the idle cores for large vectors; one otherwise, where more only get in the way."""
        self._lanes.open(idle if size_bytes >= MANY_THREADS_BYTES else 1)

    def add_up(self, shares: Sequence[tuple[Parts, float]], into: Sequence[Parts]) -> float:
        """The weighted sum of vectors, written to each of `into`; its norm. None of them may be a summand."""
        tasks = []
        for index, first in enumerate(into[0]):
            for start in range(0, first.numel(), CHUNK):
                cut = slice(start, start + CHUNK)
                summands = [(parts[index][cut], share) for parts, share in shares]
                tasks.append((summands, [parts[index][cut] for parts in into]))
        return math.sqrt(sum(self._lanes.map(lambda task: _add_up(*task, self._fused), tasks)))

    def spread(self, vectors: Sequence[Parts], mean: Parts) -> float:
        """How far vectors are from their mean, as the root of the mean square."""
        total = 0.0
        for parts in vectors:
            total += sum(starmap(_distance, zip(parts, mean, strict=True)))
        return math.sqrt(total / len(vectors))


def in_equal_shares(vectors: Sequence[Parts]) -> list[tuple[Parts, float]]:
    """Summands of a mean."""
    return [(vector, 1.0 / len(vectors)) for vector in vectors]


def add_in_turn(vectors: Iterable[tuple[Parts, float]], into: Parts) -> None:
    """The same sum, not fused, of vectors that are there one after the other; they are used up."""
    totals = [torch.zeros_like(part, dtype=torch.promote_types(part.dtype, torch.float32)) for part in into]
    for at, (parts, share) in enumerate(vectors):
        for total, part in zip(totals, parts, strict=True):
            summand = part.to(total.dtype).mul_(share)
            total.add_(summand) if at else total.copy_(summand)
    for total, part in zip(totals, into, strict=True):
        part.copy_(total)


def _add_up(summands: list[tuple[Tensor, float]], into: list[Tensor], fused: bool) -> float:
    (first, share), *others = summands
    narrow = first.dtype in (torch.bfloat16, torch.float16)
    total = first.float().mul_(share) if narrow else torch.mul(first, share, out=into[0])
    for part, share in others:
        total.add_(part, alpha=share) if fused else total.add_(part.to(total.dtype) * share)
    for target in into[0 if narrow else 1 :]:
        target.copy_(total)
    return _square(total)


def _square(flat: Tensor) -> float:
    value = float(torch.dot(flat, flat))
    if math.isfinite(value) or not bool(torch.isfinite(flat).all()):
        return value
    return float(flat.double().square().sum())


def _distance(part: Tensor, mean: Tensor) -> float:
    cuts = [slice(start, start + CHUNK) for start in range(0, part.numel(), CHUNK)]
    return sum((float((part[cut].double() - mean[cut].double()).square().sum()) for cut in cuts), 0.0)
