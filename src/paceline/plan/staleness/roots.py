"""Characteristic roots: does an error die out under stale gradients, and how fast.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`). In one direction of curvature lambda the
mean error obeys dx = -a x(t - D) dt, and decays like the root with the largest real part of

    s + a E[exp(-s D)] = 0.

With a delay law of mean 1, a is the *load* x = step * curvature * delay in updates.

How the root is found, without special functions:
- x up to the double root: the root is real, found by bisection. It is the dominant one: between the
  two real roots |s| > x |L(s)|, so that (Rouche) exactly one root lies to the right of the second.
- beyond: the pair that leaves the double root is followed in steps of x with Newton's method, and
  confirmed by counting the roots to its right (argument principle). Where that finds one, a
  grid of Newton starts looks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import cos, e, exp, inf, pi, sin, sqrt, tan

import numpy as np
from numpy.typing import NDArray

from paceline.plan.staleness.delays import Complex, Constant, DelayLaw, Gamma

SAFE_LOAD = pi / 2
"""Below this load every delay law of mean 1 is stable; a constant delay is the worst of them."""

FAR = 20.0
"""So many times beyond the bound it is no matter how many more."""

_BISECTIONS = 60
_NEWTONS = 60
_HIGHEST = 64.0
"""A bound on the load beyond this, in units of one over the mean delay, counts as none."""


@lru_cache(maxsize=4096)
def dominant_root(load: float, law: DelayLaw) -> complex:
    """The root of s + load * L(s) = 0 with the largest real part, and imaginary part >= 0."""
    if load <= 0:
        return 0j
    if isinstance(law, Constant):
        return _constant_root(load * law.mean) / law.mean
    turn, most = _double_root(law)
    if load <= most:
        return complex(-_bisect(lambda u: u < load * _real(law, -u), 0.0, turn))
    root = _follow(load, law, turn, most)
    if root.real <= law.abscissa:  # long delays die out no faster than this, and so does the error
        return complex(law.abscissa)
    alone = roots_right_of(load, law, root.real + 1e-6 / law.mean) == 0
    return root if alone else _best_of_grid(load, law, root)


def decay(load: float, law: DelayLaw) -> float:
    """How fast the mean error falls, per unit of the law's time; negative when it grows.

    From `FAR` times the bound on that of `FAR` times the bound stands for it: the error grows faster still,
    and roots would have to be counted along a line as long as the load.
    """
    bound = min(critical_load(law), _HIGHEST / law.mean)
    return -dominant_root(min(load, FAR * bound), law).real


@lru_cache(maxsize=4096)
def critical_load(law: DelayLaw) -> float:
    """The smallest load at which the error no longer dies out; infinite if there is none.

    There a root crosses the imaginary axis at i w, where L(i w) points straight down.
    """
    if isinstance(law, Constant):
        return SAFE_LOAD / law.mean
    if isinstance(law, Gamma):
        return _gamma_bound(law.shape) / law.mean
    best, low = _HIGHEST / law.mean, 0.0
    while low < best:  # a crossing at w needs a load of at least w
        high = low + 4.0 / law.mean
        best = _first_crossing(law, low, high, best)
        low = high
    return best if best < _HIGHEST / law.mean else inf


def smooth_load(law: DelayLaw) -> float:
    """The load up to which the dominant root is real: the error falls without oscillating."""
    return 1 / (e * law.mean) if isinstance(law, Constant) else _double_root(law)[1]


def roots_right_of(load: float, law: DelayLaw, real: float) -> int:
    """How many roots have a real part above `real`, by the argument principle.

    On the arc that closes the line to the right |s| > load |L(s)|, so the angle turns there as that
    of s does; only the line itself has to be walked.
    """
    reach = 2.0 * load * _real(law, real) + 4.0 / law.mean
    values = _walk(load, law, real, reach)
    turned = float(np.sum(np.angle(values[1:] / values[:-1])))
    arc = 2.0 * float(np.angle(values[-1]))
    return round((arc - 2.0 * turned) / (2.0 * pi))


def _walk(load: float, law: DelayLaw, real: float, reach: float) -> Complex:
    """s + load L(s) along the upper half of a line, in steps fine enough for its angle."""
    heights = np.linspace(0.0, reach, 257)
    values = _at(load, law, real, heights)
    for _ in range(40):
        wide = np.flatnonzero(np.abs(np.angle(values[1:] / values[:-1])) > 0.7)
        if not len(wide):
            break
        middle = (heights[wide] + heights[wide + 1]) / 2
        heights = np.insert(heights, wide + 1, middle)
        values = np.insert(values, wide + 1, _at(load, law, real, middle))
    return values


def _at(load: float, law: DelayLaw, real: float, heights: NDArray[np.float64]) -> Complex:
    s = real + 1j * heights
    value: Complex = s + load * law.laplace(s)
    return value


# -- a constant delay ----------------------------------------------------------------------------


def _constant_root(x: float) -> complex:
    """The principal branch of Lambert's W at -x."""
    if abs(x - 1 / e) < 1e-9:
        return -1 + 0j
    if x < 1 / e:
        return complex(_lambert(x))
    v = _bisect(lambda v: v / sin(v) * exp(-v / tan(v)) < x, 0.0, pi)
    return complex(-v / tan(v), v)


def _lambert(x: float) -> float:
    w = -x
    for _ in range(_NEWTONS):
        step = (w * exp(w) + x) / (exp(w) * (1 + w))
        w = max(w - step, -1.0 + 1e-12)
        if abs(step) < 1e-15:
            break
    return w


def _gamma_bound(shape: float) -> float:
    if shape <= 1:
        return inf
    angle = pi / (2 * shape)
    return float(shape * tan(angle) / cos(angle) ** shape)


# -- any delay -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _double_root(law: DelayLaw) -> tuple[float, float]:
    """Where u / L(-u) is largest, and how large: up to that load the dominant root is real.

    u / L(-u) rises, then falls, and turns at u <= 1 / mean, since log L(-u) is convex.
    """
    high = min(1.0 / law.mean, -law.abscissa * (1 - 1e-12))
    turn = _bisect(lambda u: _rises(law, u), 0.0, high)
    return turn, turn / _real(law, -turn)


def _rises(law: DelayLaw, u: float) -> bool:
    value, slope = law.with_slope(-u)
    return bool(value.real + u * slope.real > 0)


def _follow(load: float, law: DelayLaw, turn: float, most: float) -> complex:
    """Follow the pair of roots from where it leaves the real axis."""
    beyond = min(1e-3 * most, load - most)
    at = most + beyond
    start = complex(-turn, sqrt(2 * beyond * _real(law, -turn) / (most * _bend(law, turn))))
    root = _newton(at, law, start)
    while at < load:
        step = min(at - most, 0.1 * at, load - at)
        value, slope = law.with_slope(root)
        root -= step * complex(value) / (1 + at * complex(slope))
        at = load if at + step >= load else at + step
        root = _newton(at, law, root, 1e-13 if at == load else 1e-6)
    return complex(root.real, abs(root.imag))


def _bend(law: DelayLaw, turn: float) -> float:
    """The second derivative of L at the double root."""
    slopes = law.with_slope(-turn * np.array([1 - 1e-4, 1 + 1e-4]))[1].real
    return float(slopes[0] - slopes[1]) / (2e-4 * turn)


def _newton(load: float, law: DelayLaw, start: complex, tolerance: float = 1e-13) -> complex:
    return complex(_newtons(load, law, np.array([start]), tolerance)[0])


def _newtons(load: float, law: DelayLaw, s: Complex, tolerance: float = 1e-13) -> Complex:
    """Newton's method from many starts at once, until it settles or only rounding is left."""
    last = inf
    for _ in range(_NEWTONS):
        value, slope = law.with_slope(s)
        step = (s + load * value) / (1 + load * slope)
        s = s - step
        size = float(np.max(np.abs(step) / np.abs(s)))
        if size <= tolerance or (size < 1e-10 and size >= last):
            break
        last = size
    return s


def _best_of_grid(load: float, law: DelayLaw, known: complex) -> complex:
    """The rightmost root that Newton's method reaches from a grid of starts."""
    reach = load * _real(law, known.real)
    real, imaginary = np.meshgrid(np.linspace(known.real, reach, 12), np.linspace(0.0, reach, 40))
    with np.errstate(all="ignore"):
        found = _newtons(load, law, (real + 1j * imaginary).ravel())
        error = np.abs(found + load * law.laplace(found))
        good = np.isfinite(found) & (error < 1e-9 * (np.abs(found) + load))
    roots: NDArray[np.complex128] = np.append(found[good], known)
    best = complex(roots[np.argmax(roots.real)])
    return complex(best.real, abs(best.imag))


def _first_crossing(law: DelayLaw, low: float, high: float, best: float) -> float:
    """The lowest load below `best` at which a root lies on the imaginary axis between two frequencies."""
    grid = np.linspace(low, high, 129)
    values = law.laplace(1j * grid)
    sizes = np.maximum(np.abs(values[1:]), np.abs(values[:-1]))
    changes = (values.real[1:] > 0) != (values.real[:-1] > 0)
    for i in np.flatnonzero(changes & (grid[:-1] < best * sizes)):
        w = _zero(law, float(grid[i]), float(grid[i + 1]))
        value = complex(law.laplace(1j * w))
        if value.imag < 0:
            best = min(best, w / abs(value))
    return best


def _zero(law: DelayLaw, low: float, high: float) -> float:
    """Where the real part of L(i w) changes its sign."""
    first = _real_at(law, low) > 0
    return _bisect(lambda w: (_real_at(law, w) > 0) == first, low, high)


def _real_at(law: DelayLaw, w: float) -> float:
    return float(law.laplace(1j * w).real)


def _bisect(before: Callable[[float], bool], low: float, high: float) -> float:
    """Where `before` turns from true to false."""
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if before(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _real(law: DelayLaw, s: float) -> float:
    return float(law.laplace(s).real)
