"""Round robin, exactly: every gradient is `staleness` updates old, with or without momentum.

What the delay equation approximates, as a polynomial. It is exact where the approximation is
coarsest (one worker, long steps), and it is what the tests hold the approximation against.
"""

from __future__ import annotations

from math import inf, log

import numpy as np


def decay_per_update(step_curvature: float, staleness: int, momentum: float = 0.0) -> float:
    """How fast the error falls, per update: minus the log of the largest root.

    With momentum: v <- momentum * v - step * curvature * x(staleness updates ago), x <- x + v.
    """
    if staleness == 0 and momentum == 0:
        largest = abs(1 - step_curvature)
    else:
        largest = float(np.abs(np.roots(_polynomial(step_curvature, staleness, momentum))).max())
    return -log(largest) if largest > 0 else inf


def _polynomial(step_curvature: float, staleness: int, momentum: float) -> list[float]:
    """z^staleness (z - 1)(z - momentum) + step_curvature z."""
    coefficients = [1.0, -(1.0 + momentum), momentum] + [0.0] * staleness
    coefficients[staleness + 1] += step_curvature
    return coefficients
