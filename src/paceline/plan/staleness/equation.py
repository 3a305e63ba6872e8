"""The delay equation of a stream of gradients, in units of its own mean delay.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`).

Half-step rule: updates come one by one, and a continuous equation stands for them to three or
four digits when the delay counts as M - 1/2 updates instead of M. For one worker staleness is
zero whatever its cycle times, and the exact recursion is used.

Momentum: a step longer by 1 / (1 - momentum), which is the usual first approximation, and the
later action of every gradient as an additional delay (`Smeared`). Together they agree with the exact
recursion to about two per cent from two workers on.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, pi, sin

from paceline.plan.staleness.arrivals import Flow
from paceline.plan.staleness.delays import Constant, DelayLaw, Grouped, Smeared
from paceline.plan.staleness.discrete import decay_per_update
from paceline.plan.staleness.floor import exact_alone, floor_factor
from paceline.plan.staleness.roots import critical_load, decay, smooth_load


@dataclass(frozen=True, slots=True)
class Equation:
    """Everything here is a function of step * curvature, momentum's 1 / (1 - momentum) included."""

    law: DelayLaw
    delay: float
    """The mean delay in updates, by the half-step rule."""
    momentum: float = 0.0
    alone: bool = False
    """No staleness at all: one worker, or all in lockstep."""

    @classmethod
    def of(cls, flow: Flow, group: int = 1, momentum: float = 0.0) -> Equation:
        """Of updates that each apply the mean of `group` gradients, while nobody waits."""
        if flow.workers == 1:
            return cls.without_staleness(momentum)
        half = flow.workers - 0.5
        law: DelayLaw = flow.law.scaled(1 / flow.law.mean)
        if group > 1:
            law = Grouped(law, group, 1 / half)
        if momentum:
            law = Smeared(law, momentum, group / half)
        return cls(law, half / group, momentum)

    @classmethod
    def without_staleness(cls, momentum: float = 0.0) -> Equation:
        """Every gradient is fresh."""
        law = Smeared(Constant(), momentum, 2.0) if momentum else Constant()
        return cls(law, 0.5, momentum, alone=True)

    @property
    def critical(self) -> float:
        """The load from which on the error grows."""
        if self.alone:  # exactly where the step without momentum's share is 2 (1 + momentum) / curvature
            return (1 + self.momentum) / (1 - self.momentum)
        return critical_load(self.law) * discrete_share(self.delay)

    @property
    def smooth(self) -> float:
        """The load up to which the error falls without oscillating."""
        return smooth_load(self.law)

    def load(self, step_curvature: float) -> float:
        """Step * curvature * delay."""
        return step_curvature * self.delay

    def rate_per_update(self, step_curvature: float) -> float:
        """How fast the mean error falls."""
        if self.alone:
            return decay_per_update(step_curvature * (1 - self.momentum), 0, self.momentum)
        return decay(self.load(step_curvature), self.law) / self.delay

    def floor_factor(self, step_curvature: float) -> float:
        """Phi."""
        if self.alone:
            return exact_alone(step_curvature * (1 - self.momentum), self.momentum)
        load = self.load(step_curvature)
        return inf if load >= self.critical else floor_factor(load, self.law)


def discrete_share(delay: float) -> float:
    """What updates one by one leave of the continuous bound, exactly for a constant delay.

    `delay` in updates by the half-step rule: 0.64 for one worker (1/2), 0.95 for two, then near 1.
    """
    n = max(2 * delay, 1.0)
    return n * sin(pi / (2 * n)) / (pi / 2)
