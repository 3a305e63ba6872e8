"""A staleness threshold: gradients older than that are not used.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`), which drops such gradients to keep the delay
short. Of a cycle time T and a threshold theta, with p = P(T <= theta): dropped on arrival, p of the
stream is left; given up and begun anew at theta, M p / E[min(T, theta)]. Either way the delay is
that of T given T <= theta.

As a version gap theta is theta times the updates per second, and only what is kept is an update: so a
threshold in updates is p * Lambda * theta, not Lambda * theta. With the latter a simulated run keeps far more
than was predicted (`tests/plan/test_follow.py`).

Where we differ: the half-step rule is not applied; what is left of the stream is too irregular.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.plan.staleness.arrivals import Flow
from paceline.plan.staleness.delays import DelayLaw, Samples, Smeared
from paceline.plan.staleness.floor import floor_factor
from paceline.plan.staleness.outlook import Direction, course
from paceline.plan.staleness.policies import PolicyStep
from paceline.plan.staleness.roots import critical_load, decay

QUANTILES = (0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Threshold:
    """What one threshold would do."""

    seconds: float
    updates: float
    """The same as a version gap: seconds * updates per second; what is not kept is no update."""
    kept: float
    """Share of gradients that are used."""
    margin: float
    rate_per_s: float
    floor: float | None
    seconds_to_target: float | None


def thresholds(
    flow: Flow,
    directions: Sequence[Direction],
    step: PolicyStep,
    *,
    restart: bool = False,
    target: float | None = None,
    quantiles: Sequence[float] = QUANTILES,
) -> list[Threshold]:
    """What thresholds at quantiles of a measured delay would do; the last one drops nothing."""
    if not isinstance(flow.law, Samples):
        return []
    limits = np.quantile(flow.law.times, quantiles, method="inverted_cdf").tolist()
    found = (threshold(flow, limit, directions, step, restart, target) for limit in sorted(set(limits)))
    return [one for one in found if one is not None]


def threshold(
    flow: Flow,
    limit_s: float,
    directions: Sequence[Direction],
    step: PolicyStep,
    restart: bool = False,
    target: float | None = None,
) -> Threshold | None:
    """What one threshold would do; None when nothing would be left."""
    assert isinstance(flow.law, Samples)
    times = flow.law.times
    kept, young = flow.law.up_to(limit_s)
    if young is None:
        return None
    spent_s = sum(min(time, limit_s) for time in times) / len(times)
    rate = flow.workers * kept / spent_s if restart else kept * flow.per_s
    unit: DelayLaw = young.scaled(1 / young.mean)
    if step.momentum:
        unit = Smeared(unit, step.momentum, 1 / (rate * young.mean))
    length, delay = step.length(flow.workers) / (1 - step.momentum), rate * young.mean
    way = course(
        directions,
        length,
        1.0,
        lambda sc: decay(sc * delay, unit) / young.mean,
        lambda sc: floor_factor(sc * delay, unit),
        target,
    )
    load = length * delay * max(d.curvature for d in directions)
    margin = load / critical_load(unit)
    return Threshold(limit_s, limit_s * rate, kept, margin, way.rate_per_s, way.floor, way.seconds_to_target)


def best_threshold(found: Sequence[Threshold], safety: float = 1.0) -> Threshold | None:
    """The soonest at the target, else the fastest, within the margin; the mildest of equals."""
    within = [one for one in found if one.margin <= safety and one.rate_per_s > 0]
    return min(within, key=_merit, default=None)


def _merit(one: Threshold) -> tuple[float, float, float]:
    seconds = one.seconds_to_target
    return (inf if seconds is None else seconds, -one.rate_per_s, -one.seconds)
