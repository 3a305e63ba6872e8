"""What D-PSGD measures of the landscape that its replicas are spread over, as events of a trace add it up.

Used by the tally. All workers report the same figures, each in its own line.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import msgspec

FIGURES = ("effective_lr", "weight_variance", "noise_strength")


class LandscapeSummary(msgspec.Struct, frozen=True):
    """What was measured (`dpsgd` with `measure_every`): how the mean of the replicas moves."""

    reports: int
    """Lines of all workers."""
    effective_lr: float
    """The mean of all: the share of the learning rate that acts along the gradient at the mean."""
    lowest: float
    """The smallest of them."""
    last: float
    weight_variance: float
    """The largest mean square of a replica's distance from the mean."""
    noise_strength: float
    """The largest square of the noise in a step."""


def measured(before: LandscapeSummary | None, told: Mapping[str, float]) -> LandscapeSummary | None:
    """The summary with one more line, if that has such figures."""
    if not all(isfinite(told.get(name, float("nan"))) for name in FIGURES):
        return before
    share, variance, noise = (told[name] for name in FIGURES)
    if before is None:
        return LandscapeSummary(1, share, share, share, variance, noise)
    reports = before.reports + 1
    return LandscapeSummary(
        reports,
        before.effective_lr + (share - before.effective_lr) / reports,
        min(before.lowest, share),
        share,
        max(before.weight_variance, variance),
        max(before.noise_strength, noise),
    )
