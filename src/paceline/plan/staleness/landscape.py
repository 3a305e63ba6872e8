"""What the advisor knows of the model: given, measured, or said to be modelled.

The bound needs the sharpest curvature; the speed an effective one (the slow end of the spectrum);
the error floor the gradient noise; the time to a target the loss at the start. Given figures win
over measured ones. What is neither given nor measured is unknown, and so is what hangs on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from paceline.config import Weighting
from paceline.errors import ConfigError
from paceline.plan.staleness.outlook import Direction
from paceline.plan.staleness.policies import SAFETY

if TYPE_CHECKING:
    from paceline.plan.curvature import Shape

Origin = Literal["measured", "modelled", "given"]


class Fact(msgspec.Struct, frozen=True):
    """One figure that goes in, and where it comes from."""

    name: str
    value: float | str
    origin: Origin
    note: str = ""


@dataclass(frozen=True)
class Request:
    """What the user gave; None: nothing."""

    lr: float | None = None
    momentum: float = 0.0
    curvature: float | None = None
    curvature_min: float | None = None
    noise: float | None = None
    loss: float | None = None
    target_loss: float | None = None
    weighting: Weighting | None = None
    safety: float = SAFETY

    def __post_init__(self) -> None:
        for name in ("lr", "curvature", "curvature_min", "loss", "target_loss"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"--{name.replace('_', '-')} must be > 0", value)
        _require(self.noise is None or self.noise >= 0, "--noise is a variance and must be >= 0", self.noise)
        _require(0 <= self.momentum < 1, "--momentum must be in [0, 1)", self.momentum)
        _require(0 < self.safety <= 1, "--safety is a share of the bound, in (0, 1]", self.safety)
        low, high = self.curvature_min, self.curvature
        ok = low is None or high is None or low <= high
        _require(ok, f"--curvature-min must not be above --curvature {high}", low)


@dataclass(frozen=True)
class Landscape:
    """The two ends of the spectrum; one direction where they are the same."""

    directions: tuple[Direction, ...]
    facts: list[Fact]

    @property
    def sharpest(self) -> float:
        """The curvature that the bound is about."""
        return max(d.curvature for d in self.directions)


def landscape(request: Request, shape: Shape | None = None) -> Landscape:
    """Put together what was given and what was measured."""
    sharp, slow = _sharpest(request, shape), _effective(request, shape)
    noise, loss = _noise(request, shape), _loss(request, shape)
    high = float(sharp.value)
    slow = slow or Fact("effective curvature", high, "modelled", "as sharp as the sharpest, unless given")
    low = min(float(slow.value), high)
    facts = [fact for fact in (sharp, slow, noise, loss) if fact is not None]
    total, excess = _value(noise), _value(loss)
    if low == high:
        return Landscape((Direction(high, total, excess),), facts)
    steep_noise, steep_excess = _along_sharpest(request, shape, total, excess)
    rest = Direction(low, _minus(total, steep_noise), _minus(excess, steep_excess))
    return Landscape((rest, Direction(high, steep_noise, steep_excess)), facts)


def _sharpest(request: Request, shape: Shape | None) -> Fact:
    if request.curvature is not None:
        return Fact("sharpest curvature", request.curvature, "given")
    if shape is None:
        raise ConfigError(
            "the bound needs the model's largest curvature, and none was given. "
            "Use --recipe FILE to have it measured, or --curvature NUMBER."
        )
    if shape.sharpest <= 0:
        raise ConfigError(
            f"the model's largest curvature was measured as {shape.sharpest:g}, and without a positive one "
            "there is no bound. Measure later with --after STEPS --lr LR, or give --curvature."
        )
    settled = "" if shape.change < 0.02 else f"not settled: it still changed by {shape.change:.0%}"
    return Fact("sharpest curvature", shape.sharpest, "measured", settled)


def _effective(request: Request, shape: Shape | None) -> Fact | None:
    if request.curvature_min is not None:
        return Fact("effective curvature", request.curvature_min, "given")
    if shape is None or shape.effective <= 0:
        return None
    return Fact("effective curvature", shape.effective, "measured", "how fast the loss falls at first")


def _noise(request: Request, shape: Shape | None) -> Fact | None:
    if request.noise is not None:
        return Fact("gradient noise", request.noise, "given", "half at each end of the spectrum (modelled)")
    if shape is None:
        return None
    note = f"variance between batches of {shape.batch}" if shape.batch else "variance between batches"
    return Fact("gradient noise", shape.noise, "measured", note)


def _loss(request: Request, shape: Shape | None) -> Fact | None:
    if request.loss is not None:
        return Fact("loss at the start", request.loss, "given")
    return None if shape is None else Fact("loss at the start", shape.loss, "measured")


def _along_sharpest(
    request: Request, shape: Shape | None, noise: float | None, excess: float | None
) -> tuple[float | None, float | None]:
    """Noise and excess loss along the sharpest direction; of given noise half, of a given loss nothing."""
    if shape is not None and request.noise is None:
        steep_noise: float | None = min(shape.noise_sharpest, shape.noise)
    else:
        steep_noise = None if noise is None else noise / 2
    measured = shape.excess_sharpest if shape is not None else 0.0
    return steep_noise, None if excess is None else min(measured, excess)


def _value(fact: Fact | None) -> float | None:
    return None if fact is None else float(fact.value)


def _minus(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else whole - part


def _require(ok: bool, what: str, value: float | None) -> None:
    if not ok:
        raise ConfigError(f"{what}, got {value:g}.")
