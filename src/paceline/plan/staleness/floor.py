"""The error floor: how far gradient noise keeps the error from zero when gradients are stale.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`); the stationary variance of the linear delay
Langevin equation is a classical result (Kuechler and Mensch 1992). In one direction

    E[x^2] -> step * noise / (2 * curvature) * Phi,      excess loss = step / 4 * noise * Phi,

where Phi is 1 without staleness, (1 + sin x) / cos x for a constant delay, 1 + x for an exponential
one, and in general (2 x / pi) times the integral over w > 0 of 1 / |i w + x L(i w)|^2.

Momentum filters the noise as it filters the gradient, which keeps the floor of long memories down:
the integrand is multiplied by the filter's |H(i w)|^2.
"""

from __future__ import annotations

from functools import lru_cache
from math import cos, inf, pi, sin

import numpy as np
from numpy.typing import NDArray

from paceline.plan.staleness.delays import Constant, DelayLaw, ShiftedExponential, Smeared
from paceline.plan.staleness.roots import critical_load, decay, dominant_root

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_PANELS_UP_TO = 64.0
"""In units of one over the mean delay; beyond, the integrand is 1 / w^2 as good as exactly."""


@lru_cache(maxsize=4096)
def floor_factor(load: float, law: DelayLaw) -> float:
    """Phi: how many times higher the floor is than it would be without staleness."""
    if load <= 0:
        return 1.0
    if load >= critical_load(law) or decay(load, law) < 0:
        return inf
    x = load * law.mean
    if isinstance(law, Constant):
        return (1 + sin(x)) / cos(x)
    if isinstance(law, ShiftedExponential) and law.shift == 0:
        return 1 + x
    return _integral(load, law)


def exact_alone(step_curvature: float, momentum: float = 0.0) -> float:
    """Phi of a single worker, exactly; `step_curvature` without momentum's 1 / (1 - momentum)."""
    room = 2 * (1 + momentum)
    return room / (room - step_curvature) if step_curvature < room else inf


def poisson_factor(phi: float, step_curvature: float) -> float:
    """Phi if arrivals were truly Poisson: an upper bound, infinite where mean squares would diverge.

    The arrivals of real workers are more regular, so this overstates: use it as a warning only.
    """
    share = step_curvature / 2 * phi
    return phi / (1 - share) if share < 1 else inf


def _integral(load: float, law: DelayLaw) -> float:
    """Gauss-Legendre on panels that close in on the resonance, and the tail in closed form."""
    edges = _edges(dominant_root(load, law), law.mean)
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    w = (middle[:, None] + half[:, None] * _NODES).ravel()
    heights = _noise(law, w) / np.abs(1j * w + load * law.laplace(1j * w)) ** 2
    area = float((heights.reshape(-1, len(_NODES)) @ _WEIGHTS) @ half)
    return 2 * load / pi * (area + _noise_in_tail(law) / float(edges[-1]))


def _noise(law: DelayLaw, w: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.abs(law.filter(1j * w)) ** 2 if isinstance(law, Smeared) else np.ones_like(w))


def _noise_in_tail(law: DelayLaw) -> float:
    """The mean of |H|^2 over a period."""
    return (1 - law.momentum) / (1 + law.momentum) if isinstance(law, Smeared) else 1.0


def _edges(root: complex, mean: float) -> NDArray[np.float64]:
    near = abs(root.real) * 2.0 ** np.arange(-2, 30)
    peak = np.concatenate((root.imag - near, [root.imag], root.imag + near))
    top = _PANELS_UP_TO / mean + 2 * root.imag
    regular = np.arange(0.0, top, 0.5 / mean)
    edges = np.unique(np.concatenate((regular, peak[(peak > 0) & (peak < top)], [top])))
    return np.asarray(edges, float)
