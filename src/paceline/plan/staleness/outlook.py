"""What to expect of one way to run: load, margin, rate, floor, time to a target.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`).

What is modelled: a quadratic bowl. A neural network is none; its curvature changes while it
trains, and it often settles where the bound says it just may (the edge of stability). Margins are
therefore reported and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite

from paceline.plan.staleness.arrivals import Flow
from paceline.plan.staleness.delays import Constant
from paceline.plan.staleness.equation import Equation


@dataclass(frozen=True, slots=True)
class Direction:
    """One direction of the loss: how curved, and how noisy its gradients are."""

    curvature: float
    noise: float | None = None
    """Variance of one worker's gradient along it; None: unknown."""
    excess: float | None = None
    """Excess loss along it at the start; None: unknown."""


@dataclass(frozen=True, slots=True)
class ErrorCourse:
    """What the error does over time; what is unknown is None, what never happens is infinite."""

    rate_per_s: float
    """How fast the mean error falls in the slowest direction; negative when it grows in one."""
    floor: float | None
    """Excess loss that gradient noise keeps up for ever."""
    seconds_to_target: float | None


@dataclass(frozen=True, slots=True)
class Outlook:
    """What to expect of some workers."""

    workers: int
    arrivals_per_s: float
    delay_s: float
    staleness: float
    """Mean age of an applied gradient, in updates."""
    load: float
    """Step * curvature * delay in updates, in the sharpest direction."""
    critical: float
    """The load at which this delay law becomes unstable."""
    margin: float
    """Load as a share of what is stable under this delay law and under a constant delay."""
    stable: bool
    """Whether the mean error dies out in every direction."""
    rate_per_update: float
    rate_per_s: float
    floor: float | None
    floor_factor: float
    """How many times higher the floor is along the sharpest direction than it would be without staleness."""
    seconds_to_target: float | None


def predict(
    flow: Flow,
    directions: Sequence[Direction],
    step: float,
    *,
    momentum: float = 0.0,
    group: int = 1,
    target: float | None = None,
) -> Outlook:
    """What to expect of `flow` with updates of length `step`, each the mean of `group` gradients."""
    equation = Equation.of(flow, group, momentum)
    constant = Equation.of(_constant(flow), group, momentum)
    bound = min(equation.critical, constant.critical)
    staleness = (flow.workers - 1) / group
    return expect(flow, equation, bound, directions, step, group, flow.per_s / group, staleness, target)


def expect(
    flow: Flow,
    equation: Equation,
    bound: float,
    directions: Sequence[Direction],
    step: float,
    group: int,
    updates_per_s: float,
    staleness: float,
    target: float | None,
) -> Outlook:
    """What a delay equation says of a flow; `bound` is the load its margin is counted from."""
    longer = step / (1 - equation.momentum)
    way = course(
        directions,
        longer,
        1 / group,
        lambda sc: equation.rate_per_update(sc) * updates_per_s,
        equation.floor_factor,
        target,
    )
    sharpest = longer * max(d.curvature for d in directions)
    load = equation.load(sharpest)
    return Outlook(
        workers=flow.workers,
        arrivals_per_s=flow.per_s,
        delay_s=flow.delay_s,
        staleness=staleness,
        load=load,
        critical=equation.critical,
        margin=load / bound,
        stable=load < equation.critical
        and way.rate_per_s >= 0,  # a bound that is out of sight counts as none
        rate_per_update=way.rate_per_s / updates_per_s,
        rate_per_s=way.rate_per_s,
        floor=way.floor,
        floor_factor=equation.floor_factor(sharpest),
        seconds_to_target=way.seconds_to_target,
    )


def course(
    directions: Sequence[Direction],
    step: float,
    noise_share: float,
    rate_per_s: Callable[[float], float],
    floor_factor: Callable[[float], float],
    target: float | None,
) -> ErrorCourse:
    """Rate, floor and time to target over all directions, from their functions of step * curvature.

    Directions without positive curvature are left out: nothing decays along them.
    """
    curved = [d for d in directions if d.curvature > 0]
    rates = [rate_per_s(step * d.curvature) for d in curved]
    floors = [_floor(d, step, noise_share, floor_factor) for d in curved]
    known = [floor for floor in floors if floor is not None]
    floor = sum(known) if curved and len(known) == len(curved) else None
    excess = [d.excess for d in curved if d.excess is not None]
    seconds = None
    if target is not None and floor is not None and len(excess) == len(curved):
        seconds = hitting_s(excess, known, rates, target)
    return ErrorCourse(min(rates, default=0.0), floor, seconds)


def critical_step(flow: Flow, curvature: float, momentum: float = 0.0) -> float:
    """The length of update from which on a direction is unstable."""
    return _step_of(Equation.of(flow, 1, momentum), lambda equation: equation.critical, curvature)


def critical_step_constant(flow: Flow, curvature: float, momentum: float = 0.0) -> float:
    """The same if all delays were equal: below this every delay law of that mean is stable."""
    return critical_step(_constant(flow), curvature, momentum)


def smooth_step(flow: Flow, curvature: float, momentum: float = 0.0) -> float:
    """The length of update up to which the error falls without oscillating."""
    return _step_of(Equation.of(flow, 1, momentum), lambda equation: equation.smooth, curvature)


def hitting_s(
    excess: Sequence[float], floors: Sequence[float], rates_per_s: Sequence[float], target: float
) -> float:
    """When the sum over directions of floor + (excess - floor) exp(-2 rate t) falls to the target."""
    parts = list(zip(excess, floors, rates_per_s, strict=True))

    def left(t: float) -> float:
        return sum(f + (e - f) * exp(-2 * rate * t) for e, f, rate in parts)

    if sum(excess) <= target:
        return 0.0
    if not all(isfinite(f) and rate > 0 for _, f, rate in parts) or sum(floors) >= target:
        return inf
    low, high = 0.0, 1 / min(rates_per_s)
    while left(high) > target:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) > target else (low, middle)
    return (low + high) / 2


def _constant(flow: Flow) -> Flow:
    return Flow(flow.workers, flow.per_s, Constant(flow.delay_s))


def _step_of(equation: Equation, load: Callable[[Equation], float], curvature: float) -> float:
    if curvature <= 0:
        return inf
    return load(equation) * (1 - equation.momentum) / (equation.delay * curvature)


def _floor(
    direction: Direction, step: float, noise_share: float, factor: Callable[[float], float]
) -> float | None:
    if not direction.noise:
        return direction.noise
    return step / 4 * direction.noise * noise_share * factor(step * direction.curvature)
