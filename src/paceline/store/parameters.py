"""The parameter store's arithmetic: weights, the torch optimizer, one update at a time.

It knows no protocol, no process and no fabric: it is given flat memory and told what to do. Only
the store writes weights. Gradients are reduced in rank order, chunk by chunk while a chunk is in
cache, so a flush repeats bit for bit whatever the order of arrival, and its norm costs no extra
pass over memory. Nothing is applied before it is known to be finite.

A norm that decides how far weights move (clipping) has to be the same wherever a store is cut into
portions: its squares are added up parameter by parameter, and chunks end at fixed places of a segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.store.corrections.correction import Corrections, Parts, Stride, make_corrections, without_ours
from paceline.store.lanes import Lanes
from paceline.store.layout import Layout
from paceline.store.optimizers import (
    GroupSettings,
    OptimizerSpec,
    adjust,
    apply_settings,
    build_optimizer,
    export_state,
    import_state,
)
from paceline.store.pieces import CutMemory, Piece, Pieces, WeightCopies

CHUNK = 1 << 19
"""Elements reduced at once: two megabytes of float32, which the cache still holds for the norm."""
MANY_THREADS_BYTES = 4 << 20
"""From this size on more than one thread pays, if the cores are free."""


class Gradients:
    """One worker's gradients as the store sees them."""

    def __init__(self, layout: Layout, segment: Tensor) -> None:
        self.views = layout.gradient_views(segment)
        self.flats = [region.flat(segment, region.gradients) for region in layout.regions]
        self.chunks = [
            chunk
            for region, flat in zip(layout.regions, self.flats, strict=True)
            for chunk in _chunks(flat, region.gradients // region.item_bytes)
        ]
        self.missing: frozenset[int] = frozenset()
        """Trained parameters that have no gradient in this push."""
        self.memory = CutMemory(self.flats)

    def bad_parameter(self, layout: Layout) -> str | None:
        """The first parameter whose gradient is not finite."""
        for slot, view in zip(layout.trained, self.views, strict=True):
            if not bool(torch.isfinite(view).all()):
                return slot.name
        return None


class ParameterStore:
    """Weights and optimizer of one run."""

    applies: ClassVar[str] = "optimizer"

    def __init__(self, layout: Layout, spec: OptimizerSpec, weights: Tensor, *, fast: bool = True) -> None:
        self.layout = layout
        self.weights = weights
        self.views = layout.weight_views(weights)
        trained = [
            v for v, slot in zip(self.views, layout.parameters, strict=True) if slot.gradient is not None
        ]
        self._optimizer = build_optimizer(spec, trained, fast)
        self._spec = spec
        self._trained = trained
        self._copies = WeightCopies(layout)
        self._flats = self._regions(weights)
        self._lanes = Lanes()
        self._large = layout.gradient_bytes >= MANY_THREADS_BYTES
        self.adjusted: dict[str, float] = {}
        """Factors on the optimizer's settings that the protocol asked for."""
        self._even = fast and Pieces.suit(layout, spec)
        self._pieces: Pieces | None = None
        self.corrections: Corrections | None = None
        """What is done about stale gradients, if anything is."""
        self.looks_ahead = False
        """Whether what workers are handed is not the weights themselves."""
        self.mends = False
        """Whether gradients are changed as they come."""
        self._lengths: dict[int, list[int]] = {}
        """How chunks are cut for their squares, by number: where parameters begin, or not at all."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer with one state per parameter, as checkpoints know it."""
        if self._pieces is not None:
            self._pieces.hand_back(self._optimizer, self._trained)
            self._pieces = None
        return self._optimizer

    def correct(self, name: str) -> None:
        """From now on correct stale gradients in this way."""
        corrections = self.corrections = make_corrections(self.layout, self._spec, name)
        self.looks_ahead = corrections is not None and corrections.steps
        self.mends = corrections is not None and corrections.mends

    @property
    def corrected_by(self) -> str:
        """How stale gradients are corrected."""
        return "none" if self.corrections is None else self.corrections.name

    def export(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of the optimizer's state, by parameter, and of what corrects; steps go on as before."""
        tensors, values = self.optimizer_state()
        if self.corrections is None:
            return tensors, values
        ours = self.corrections.export()
        return tensors | ours[0], values | ours[1]

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Go on from what `export` gave."""
        import_state(self.optimizer, without_ours(tensors), without_ours(values))
        if self.corrections is not None:
            self.corrections.load(tensors, values)

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A copy of it alone."""
        if self._pieces is None:
            return export_state(self._optimizer)
        self._pieces.hand_back(self._optimizer, self._trained)
        try:
            return export_state(self._optimizer, copied=True)
        finally:
            self._optimizer.state.clear()  # the pieces have it

    @property
    def stepped_by(self) -> str:
        """The optimizer's class."""
        return self._spec.name

    def step_singly(self) -> None:
        """From now on every parameter is stepped by itself."""
        self._even = False

    def norm_by_parameter(self) -> None:
        """From now on a norm has the same bits wherever the store is cut; it takes a little longer."""
        self._lengths = dict(enumerate(_lengths(self.layout)))

    def use_cores(self, idle: int) -> None:
        """Use the idle cores for a large model; one otherwise, where more only get in the way."""
        self._lanes.open(idle if self._large else 1)

    def apply(
        self,
        gradients: Gradients,
        settings: list[GroupSettings],
        scale: float,
        norm: float | None = None,
        clip: float | None = None,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """One optimizer step with these gradients, the learning rate scaled.

        The weights go into the `copies` as well, for sleeping workers: each piece while it is in cache.
        """
        if clip is not None:
            self._clip(gradients, clip, norm)
        settings = adjust(settings, self.adjusted)
        watching = self.corrections if self.corrections is not None and self.corrections.watches else None
        before = [] if watching is None else [flat.clone() for flat in self._flats]
        pieces = self._whole(gradients)
        if pieces is None:
            self._step_parameters(gradients, settings, scale)
            for copy in copies:
                self.copy_weights(copy)
        else:
            targets = [self._copies.of(copy).in_pieces(pieces) for copy in copies]
            parts = gradients.memory.in_pieces(pieces)
            work = partial(_step_piece, pieces.all, parts, settings, scale, targets)
            last_first = range(len(pieces.all))[::-1]  # the gradient's end was read last: still in cache
            self._lanes.map(work, last_first)
        if watching is not None:
            watching.moved(before, self._flats, self._lanes)

    def apply_each(
        self,
        parts: Parts,
        settings: list[GroupSettings],
        stride: Stride,
        copies: Sequence[Tensor] = (),
    ) -> None:
        """One step in which every gradient goes through its own worker's momentum.

        The look-ahead goes into the `copies`, for sleeping workers.
        """
        assert self.corrections is not None
        settings = adjust(settings, self.adjusted)
        targets = [self._regions(copy) for copy in copies]
        self.corrections.step(parts, self._flats, settings, stride, targets, self._lanes)

    def mend(self, gradients: Gradients, read: Tensor) -> None:
        """Correct a gradient that has come from a worker, computed at the weights it has in this memory."""
        if self.corrections is not None:
            self.corrections.mend(gradients, self._flats, self._regions(read), self._lanes)

    def awake(self, workers: frozenset[int]) -> bool:
        """Only these compute, or are about to; whether that is news."""
        corrections = self.corrections
        if corrections is None or not corrections.steps or corrections.awake == workers:
            return False
        corrections.awake = workers
        return True

    def forget(self, worker: int) -> None:
        """A worker has left, and its momentum with it."""
        if self.corrections is not None:
            self.corrections.forget(worker, self._lanes)

    def _whole(self, gradients: Gradients) -> Pieces | None:
        """The weights in pieces, as long as all parameters have gone the same way."""
        if self._even and gradients.missing:
            self._even = False
        elif self._even and self._pieces is None:
            pieces = Pieces(self.layout, self._spec, self._flats)
            self._even = pieces.take(self._optimizer, self._trained)
            self._pieces = pieces
        return self._pieces if self._even else None

    def _step_parameters(self, gradients: Gradients, settings: list[GroupSettings], scale: float) -> None:
        optimizer = self.optimizer
        for index, (parameter, view) in enumerate(zip(self._trained, gradients.views, strict=True)):
            parameter.grad = None if index in gradients.missing else view
        apply_settings(optimizer, settings)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * scale
        optimizer.step()

    def reduce(
        self, parts: Sequence[tuple[Gradients, float]], into: Gradients | None = None
    ) -> tuple[Gradients, float]:
        """Weighted sum of several gradients, and its norm; into the first one's memory, or other memory."""
        total, squares = self.add_up(parts, into)
        return total, math.sqrt(sum(squares))

    def add_up(
        self, parts: Sequence[tuple[Gradients, float]], into: Gradients | None = None
    ) -> tuple[Gradients, list[float]]:
        """The same sum, and the squares that make its norm, in order.

        A parameter counts as missing only if it is missing from all.
        """
        total = into or parts[0][0]
        work = partial(_reduce, parts, total, self._lengths)
        squares = self._lanes.map(work, range(len(total.chunks)))
        total.missing = frozenset.intersection(*(g.missing for g, _ in parts))
        return total, list(chain.from_iterable(squares))

    def norm(self, gradients: Gradients) -> float:
        """The gradient's norm; not finite exactly when some element is not (overflow aside)."""
        return math.sqrt(sum(self.squares(gradients)))

    def squares(self, gradients: Gradients) -> list[float]:
        """What makes the gradient's norm, in order."""
        work = partial(_chunk_squares, gradients, self._lengths)
        return list(chain.from_iterable(self._lanes.map(work, range(len(gradients.chunks)))))

    def hand_out(self, segment: Tensor) -> None:
        """Give a sleeping worker what it is to compute on: the current weights, or a look-ahead."""
        if self.corrections is not None and self.corrections.steps:
            self.corrections.hand_out(self._flats, self._regions(segment), self._lanes)
        else:
            self.copy_weights(segment)

    def copy_weights(self, segment: Tensor) -> None:
        """Give a sleeping worker the current weights themselves."""
        for target, flat in zip(self._regions(segment), self._flats, strict=True):
            self._lanes.map(_copy, list(zip(_chunks(target), _chunks(flat), strict=True)))

    def take_weights(self, segment: Tensor) -> None:
        """What a sleeping worker has made of the current weights takes their place."""
        for source, flat in zip(self._regions(segment), self._flats, strict=True):
            self._lanes.map(_copy, list(zip(_chunks(flat), _chunks(source), strict=True)))

    def _regions(self, segment: Tensor) -> list[Tensor]:
        return self._copies.of(segment).flats

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name."""
        for slot, view in zip(self.layout.parameters, self.views, strict=True):
            yield slot.name, view

    def _clip(self, gradients: Gradients, clip: float, norm: float | None) -> None:
        norm = self.norm(gradients) if norm is None else norm
        if norm > clip:
            for flat in gradients.flats:
                flat.mul_(clip / (norm + 1e-6))


def _chunks(flat: Tensor, place: int = 0) -> list[Tensor]:
    """A vector that begins at this place, cut there where the whole memory would be."""
    return [flat[start - place : stop - place] for start, stop in _bounds(place, flat.numel())]


def _bounds(place: int, length: int) -> Iterator[tuple[int, int]]:
    inner = range(place - place % CHUNK + CHUNK, place + length, CHUNK)
    return pairwise([place, *inner, place + length] if length else [])


def _lengths(layout: Layout) -> Iterator[list[int]]:
    """How each chunk is cut where parameters begin."""
    begins = [slot.gradient or 0 for slot in layout.trained]
    for region in layout.regions:
        size = region.item_bytes
        for start, stop in _bounds(region.gradients // size, region.size_bytes // size):
            inner = [begin // size for begin in begins if start * size < begin < stop * size]
            yield [two - one for one, two in pairwise([start, *inner, stop])]


def _step_piece(
    pieces: Sequence[tuple[int, Piece]],
    gradients: Sequence[Tensor],
    settings: list[GroupSettings],
    scale: float,
    targets: Sequence[Sequence[Tensor]],
    index: int,
) -> None:
    group, piece = pieces[index]
    piece.step(gradients[index], settings[group], scale)
    for target in targets:
        target[index].copy_(piece.weights)


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    target, source = pair
    target.copy_(source)


def _reduce(
    gradients: Sequence[tuple[Gradients, float]],
    target: Gradients,
    lengths: dict[int, list[int]],
    index: int,
) -> list[float]:
    """Accumulate one chunk; the squares of the result."""
    into, parts = target.chunks[index], [(each.chunks[index], share) for each, share in gradients]
    if target is not gradients[0][0]:
        parts[0] = into.copy_(parts[0][0]), parts[0][1]
    total = _accumulate(parts, narrow=into.dtype in (torch.bfloat16, torch.float16))
    if total.data_ptr() != into.data_ptr():
        into.copy_(total)
    return _squares(total, lengths.get(index))


def _accumulate(parts: list[tuple[Tensor, float]], narrow: bool) -> Tensor:
    """In place where the type is wide enough; 16-bit types add up in float32."""
    first, whole = parts[0]
    total = first.float() if narrow else first
    if whole == 1.0:
        for part, share in parts[1:]:
            total.add_(part, alpha=share)
        return total
    for part, share in parts[1:]:  # a running mean, which takes one pass over memory per part
        whole += share
        total.lerp_(part.to(total.dtype), share / whole if whole else 0.0)
    return total if math.isclose(whole, 1.0) else total.mul_(whole)


def _chunk_squares(gradients: Gradients, lengths: dict[int, list[int]], index: int) -> list[float]:
    return _squares(gradients.chunks[index], lengths.get(index))


def _squares(chunk: Tensor, lengths: list[int] | None) -> list[float]:
    """Of the whole chunk, or of each part of it."""
    parts = [chunk] if lengths is None else torch.split_with_sizes(chunk, lengths)
    return [_square(part) for part in parts]


def _square(flat: Tensor) -> float:
    if flat.dtype in (torch.float32, torch.float64):
        value = float(torch.dot(flat, flat))
    else:
        value = float(flat.abs().float().square().sum())
    if math.isfinite(value) or not bool(torch.isfinite(flat).all()):
        return value
    return float(flat.abs().double().square().sum())


def clip_factor(norm: float, clip: float | None) -> float:
    """What a gradient of this norm is multiplied with."""
    return 1.0 if clip is None or norm <= clip else clip / (norm + 1e-6)


def shares(weights: Sequence[float], samples: Sequence[int], mean: bool) -> list[float]:
    """Each contribution's factor in a flush: by samples for a mean, so that it equals the large batch."""
    if not mean:
        return list(weights)
    parts = [weight * count for weight, count in zip(weights, samples, strict=True)]
    total = sum(parts)
    return [part / total for part in parts] if total > 0 else [1.0 / len(parts)] * len(parts)
