"""Gradients that await a flush.

A held gradient stays where its worker left it, in the worker's segment, as long as the worker
sleeps. Some rules let a worker run on meanwhile: then its gradient is first copied into memory of
the store's own, because the worker is about to overwrite it.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from paceline.fabric.segment import check_room
from paceline.store.layout import Layout
from paceline.store.parameters import Gradients


class HeldGradient(NamedTuple):
    """One pushed gradient."""

    rank: int
    gradients: Gradients
    weight: float
    samples: int
    which: int = 0
    """Of several optimizers, the one whose gradient it is."""
    read: int = 0
    """The version it was computed on."""


class HeldGradients:
    """All that await a flush: by rank, then in the order they came."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._held: dict[int, list[HeldGradient]] = {}
        self._own: list[Gradients] = []
        self._spare: list[Gradients] = []

    def hold(self, pushed: HeldGradient) -> None:
        """Keep a gradient, where it lies."""
        self._held.setdefault(pushed.rank, []).append(pushed)

    def set_aside(self, rank: int) -> None:
        """The worker is about to compute: what lies in its segment moves to the store's own memory."""
        held = self._held.get(rank)
        if held and held[-1].gradients not in self._own:
            held[-1] = self.apart(held[-1])

    def apart(self, pushed: HeldGradient) -> HeldGradient:
        """A copy in the store's own memory, until it is `done`."""
        return pushed._replace(gradients=self._copy(pushed.gradients))

    def take(self) -> list[HeldGradient]:
        """Hand all of them out. The memory is free for others once `done` is told."""
        held, self._held = self._held, {}
        return [part for rank in sorted(held) for part in held[rank]]

    def done(self, *parts: HeldGradient) -> None:
        """These are in the weights now."""
        if self._own:
            self._spare += [part.gradients for part in parts if part.gradients in self._own]

    @cached_property
    def scratch(self) -> Gradients:
        """Memory for a sum that is only looked at."""
        return self._made("the sum of the gradients of a flush")

    def _made(self, what: str) -> Gradients:
        check_room(self._layout.gradient_bytes, what)
        return Gradients(self._layout, torch.zeros(self._layout.segment_bytes, dtype=torch.uint8))

    def _copy(self, gradients: Gradients) -> Gradients:
        if not self._spare:
            self._spare.append(self._made("a gradient that is held while its worker runs on"))
            self._own.append(self._spare[-1])
        copy = self._spare.pop()
        for target, source in zip(copy.flats, gradients.flats, strict=True):
            target.copy_(source)
        copy.missing = gradients.missing
        return copy
