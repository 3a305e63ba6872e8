"""The parameter store's arithmetic: weights, the torch optimizer, one update at a time.

It knows no protocol, no process and no fabric: it is given flat memory and told what to do. Only
the store writes weights. Gradients are reduced in rank order, chunk by chunk while a chunk is in
cache, so a flush repeats bit for bit whatever the order of arrival, and its norm costs no extra
pass over memory. Nothing is applied before it is known to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from paceline.store.layout import Layout
from paceline.store.optimizers import (
    GroupSettings,
    OptimizerSpec,
    apply_settings,
    build_optimizer,
)

CHUNK = 1 << 19
"""Elements reduced at once: two megabytes of float32, which the cache still holds for the norm."""
MANY_THREADS_BYTES = 4 << 20
"""From this size on more than one thread pays, if the cores are free."""


class Gradients:
    """One worker's gradients as the store sees them."""

    def __init__(self, layout: Layout, segment: Tensor) -> None:
        self.views = layout.gradient_views(segment)
        self.flats = [region.flat(segment, region.gradients) for region in layout.regions]
        self.missing: frozenset[int] = frozenset()
        """Trained parameters that have no gradient in this push."""

    def bad_parameter(self, layout: Layout) -> str | None:
        """The first parameter whose gradient is not finite."""
        for slot, view in zip(layout.trained, self.views, strict=True):
            if not bool(torch.isfinite(view).all()):
                return slot.name
        return None


class ParameterStore:
    """Weights and optimizer of one run."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, weights: Tensor, *, fast: bool = True) -> None:
        self.layout = layout
        self.weights = weights
        self.views = layout.weight_views(weights)
        trained = [
            v for v, slot in zip(self.views, layout.parameters, strict=True) if slot.gradient is not None
        ]
        self.optimizer = build_optimizer(spec, trained, fast)
        self._trained = trained
        self._flats = [region.flat(weights, region.weights) for region in layout.regions]

    def apply(
        self,
        gradients: Gradients,
        settings: list[GroupSettings],
        scale: float,
        norm: float | None = None,
        clip: float | None = None,
    ) -> None:
        """One optimizer step with these gradients, the learning rate scaled."""
        if clip is not None:
            self._clip(gradients, clip, norm)
        for index, (parameter, view) in enumerate(zip(self._trained, gradients.views, strict=True)):
            parameter.grad = None if index in gradients.missing else view
        apply_settings(self.optimizer, settings)
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * scale
        self.optimizer.step()

    def reduce(self, contributions: Mapping[int, tuple[Gradients, float]]) -> tuple[Gradients, float]:
        """Weighted sum of several workers' gradients, into the first one's memory, and its norm.

        A parameter counts as missing only if it is missing from all.
        """
        first = next(iter(contributions.values()))[0]
        parts = list(contributions.values())
        square = 0.0
        for index in range(len(first.flats)):
            square += _reduce_flat([(g.flats[index], share) for g, share in parts])
        first.missing = frozenset.intersection(*(g.missing for g, _ in parts))
        return first, math.sqrt(square)

    def norm(self, gradients: Gradients) -> float:
        """The gradient's norm; not finite exactly when some element is not (overflow aside)."""
        return math.sqrt(sum(_square(flat) for flat in gradients.flats))

    def copy_weights(self, segment: Tensor) -> None:
        """Give a sleeping worker the current weights."""
        for region, flat in zip(self.layout.regions, self._flats, strict=True):
            region.flat(segment, region.weights).copy_(flat)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters by name."""
        for slot, view in zip(self.layout.parameters, self.views, strict=True):
            yield slot.name, view

    def _clip(self, gradients: Gradients, clip: float, norm: float | None) -> None:
        norm = self.norm(gradients) if norm is None else norm
        if norm > clip:
            for flat in gradients.flats:
                flat.mul_(clip / (norm + 1e-6))


def use_threads(layout: Layout, idle_cores: int) -> None:
    """Use the idle cores for a large model; one thread otherwise, where more only get in the way."""
    many = layout.gradient_bytes >= MANY_THREADS_BYTES
    torch.set_num_threads(max(1, idle_cores) if many else 1)


def _reduce_flat(parts: list[tuple[Tensor, float]]) -> float:
    """Accumulate into the first part, chunk by chunk; the sum of squares of the result."""
    into = parts[0][0]
    narrow = into.dtype in (torch.bfloat16, torch.float16)
    square = 0.0
    for start in range(0, into.numel(), CHUNK):
        chunk = into[start : start + CHUNK]
        total = _accumulate([(part[start : start + CHUNK], share) for part, share in parts], narrow)
        square += _square(total)
        if total.data_ptr() != chunk.data_ptr():
            chunk.copy_(total)
    return square


def _accumulate(parts: list[tuple[Tensor, float]], narrow: bool) -> Tensor:
    """In place where the type is wide enough; 16-bit types add up in float32."""
    first, share = parts[0]
    total = first.float() if narrow else first
    if share != 1.0:
        total.mul_(share)
    for part, share in parts[1:]:
        total.add_(part, alpha=share)
    return total


def _square(flat: Tensor) -> float:
    if flat.dtype in (torch.float32, torch.float64):
        value = float(torch.dot(flat, flat))
    else:
        value = float(flat.abs().float().square().sum())
    if math.isfinite(value) or not bool(torch.isfinite(flat).all()):
        return value
    return float(flat.abs().double().square().sum())


def shares(weights: Mapping[int, float], samples: Mapping[int, int], mean: bool) -> dict[int, float]:
    """Each contribution's factor in a flush: by samples for a mean, so that it equals the large batch."""
    if not mean:
        return dict(weights)
    total = sum(weights[w] * samples[w] for w in weights)
    if total <= 0:
        return {w: 1.0 / len(weights) for w in weights}
    return {w: weights[w] * samples[w] / total for w in weights}
