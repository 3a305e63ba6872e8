"""How old an arriving gradient is: delay laws and their Laplace transforms.

Paper: Yu, Chen, Poor, "Distributed Stochastic Gradient Descent with Staleness: A Stochastic Delay
Differential Equation Based Framework", IEEE TSP 2025, arXiv 2406.11159.

The delay of a gradient is the time from reading the weights to its arrival at the store: the
ordinary law of a worker's cycle, not the length-biased one, since arrivals are seen at completions.
All that the theory needs of a law is its mean and E[exp(-s D)].

Where we differ: whether the paper puts the mean delay or the whole law into its root equation is
not known to us; we use the whole law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, log
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.errors import ConfigError

Complex = NDArray[np.complex128]

BINS = 128
"""Measured times are kept as the means of this many equally likely bins."""
_LARGEST = 600.0
"""exp of more than this is as good as infinite, and would overflow in a sum."""


class DelayLaw(Protocol):
    """A law of delays. Both transforms take any array of complex numbers."""

    def __hash__(self) -> int: ...

    @property
    def mean(self) -> float:
        """E[D]."""
        ...

    @property
    def abscissa(self) -> float:
        """Where E[exp(-s D)] ceases to be finite: to the right of this it is."""
        ...

    def laplace(self, s: ArrayLike) -> Complex:
        """E[exp(-s D)]."""
        ...

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        """The same and its derivative, -E[D exp(-s D)]."""
        ...

    def scaled(self, factor: float) -> DelayLaw:
        """The law of `factor` times D."""
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Always the same: the least stable law of all with that mean."""

    mean: float = 1.0

    @property
    def abscissa(self) -> float:
        return -inf

    def laplace(self, s: ArrayLike) -> Complex:
        return _exp(-_complex(s) * self.mean)

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        value = self.laplace(s)
        return value, -self.mean * value

    def scaled(self, factor: float) -> Constant:
        return Constant(self.mean * factor)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Shape = mean^2 / variance: 1 is exponential, infinite is constant."""

    shape: float
    mean: float = 1.0

    def __post_init__(self) -> None:
        if self.shape <= 0:
            raise ConfigError(f"gamma shape must be > 0, got {self.shape:g}. It is mean^2 / variance.")

    @property
    def abscissa(self) -> float:
        return -self.shape / self.mean

    def laplace(self, s: ArrayLike) -> Complex:
        return _exp(_complex(-self.shape * np.log1p(_complex(s) * self.mean / self.shape)))

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        value = self.laplace(s)
        return value, -self.mean * value / (1 + _complex(s) * self.mean / self.shape)

    def scaled(self, factor: float) -> Gamma:
        return replace(self, mean=self.mean * factor)


@dataclass(frozen=True, slots=True)
class ShiftedExponential:
    """A least time, `shift` of the mean, plus an exponential delay; shift 0 is a pure exponential."""

    shift: float = 0.0
    mean: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.shift < 1:
            raise ConfigError(
                f"the shift of a shifted exponential must be in [0, 1), got {self.shift:g}. "
                "It is the least time as a share of the mean; use a constant law for 1."
            )

    @property
    def abscissa(self) -> float:
        return -1 / ((1 - self.shift) * self.mean)

    def laplace(self, s: ArrayLike) -> Complex:
        u = _complex(s) * self.mean
        return _exp(-u * self.shift) / (1 + u * (1 - self.shift))

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        value = self.laplace(s)
        rest = (1 - self.shift) / (1 + _complex(s) * self.mean * (1 - self.shift))
        return value, -self.mean * (self.shift + rest) * value

    def scaled(self, factor: float) -> ShiftedExponential:
        return replace(self, mean=self.mean * factor)


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured times, all equally likely."""

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.times or min(self.times) < 0 or sum(self.times) <= 0:
            raise ConfigError(
                f"a measured delay law needs times > 0, got {list(self.times[:3])}. Record a longer run."
            )

    @classmethod
    def of(cls, times: Sequence[float], weights: Sequence[float] | None = None) -> Samples:
        """The law of measured times, sorted and thinned to bins; the mean is kept exactly."""
        values = np.asarray(times, float)
        if values.min() == values.max():
            return cls((float(values[0]),))
        order = np.argsort(values, kind="stable")
        if weights is None and len(values) <= BINS:
            return cls(tuple(values[order].tolist()))
        shares = np.ones(len(values)) if weights is None else np.asarray(weights, float)[order]
        return cls(tuple(_bin_means(values[order], shares / shares.sum()).tolist()))

    @property
    def mean(self) -> float:
        return sum(self.times) / len(self.times)

    @property
    def abscissa(self) -> float:
        return -inf

    def laplace(self, s: ArrayLike) -> Complex:
        return _mean(self._powers(s))

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        powers = self._powers(s)
        return _mean(powers), -_mean(powers * np.asarray(self.times))

    def scaled(self, factor: float) -> Samples:
        return Samples(tuple(time * factor for time in self.times))

    def shifted(self, by: float) -> Samples:
        """A constant added to every time; none becomes negative."""
        return Samples(tuple(max(time + by, 0.0) for time in self.times))

    def up_to(self, limit: float) -> tuple[float, Samples | None]:
        """The share of times of at most `limit`, and their law."""
        kept = tuple(time for time in self.times if time <= limit)
        return len(kept) / len(self.times), Samples(kept) if sum(kept) > 0 else None

    def _powers(self, s: ArrayLike) -> Complex:
        return _exp(-_complex(s)[..., None] * np.asarray(self.times))


@dataclass(frozen=True, slots=True)
class Mixture:
    """One law or another: gradients of unlike workers, each weighted by how many it sends."""

    parts: tuple[tuple[float, DelayLaw], ...]
    """(weight, law)."""

    @property
    def mean(self) -> float:
        total = sum(weight for weight, _ in self.parts)
        return sum(weight * law.mean for weight, law in self.parts) / total

    @property
    def abscissa(self) -> float:
        return max(law.abscissa for _, law in self.parts)

    def laplace(self, s: ArrayLike) -> Complex:
        return self.with_slope(s)[0]

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        total = sum(weight for weight, _ in self.parts)
        value, slope = np.zeros_like(_complex(s)), np.zeros_like(_complex(s))
        for weight, law in self.parts:
            values, slopes = law.with_slope(s)
            value, slope = value + weight / total * values, slope + weight / total * slopes
        return value, slope

    def scaled(self, factor: float) -> Mixture:
        return Mixture(tuple((weight, law.scaled(factor)) for weight, law in self.parts))


@dataclass(frozen=True, slots=True)
class Grouped:
    """D plus the wait until a group of `size` is full: j gaps, j uniform on 0..size-1."""

    law: DelayLaw
    size: int
    gap: float

    @property
    def mean(self) -> float:
        return self.law.mean + self.gap * (self.size - 1) / 2

    @property
    def abscissa(self) -> float:
        return self.law.abscissa

    def laplace(self, s: ArrayLike) -> Complex:
        return self.law.laplace(s) * _mean(self._steps(s))

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        value, slope = self.law.with_slope(s)
        steps = self._steps(s)
        wait, later = _mean(steps), _mean(steps * self.gap * np.arange(self.size))
        return value * wait, slope * wait - value * later

    def scaled(self, factor: float) -> Grouped:
        return Grouped(self.law.scaled(factor), self.size, self.gap * factor)

    def _steps(self, s: ArrayLike) -> Complex:
        return _exp(-_complex(s)[..., None] * self.gap * np.arange(self.size))


@dataclass(frozen=True, slots=True)
class Smeared:
    """What momentum does: a gradient acts on all later updates, `gap` apart, with falling weight.

    That is a geometric delay added to D. It refines the usual first approximation, a step longer by
    1 / (1 - momentum), which alone puts the stability bound up to 30 % too high.
    """

    law: DelayLaw
    momentum: float
    gap: float

    @property
    def mean(self) -> float:
        return self.law.mean + self.gap * self.momentum / (1 - self.momentum)

    @property
    def abscissa(self) -> float:
        return max(self.law.abscissa, log(self.momentum) / self.gap if self.momentum else -inf)

    def filter(self, s: ArrayLike) -> Complex:
        """What momentum alone does to a signal."""
        return (1 - self.momentum) / (1 - self.momentum * _exp(-_complex(s) * self.gap))

    def laplace(self, s: ArrayLike) -> Complex:
        return self.law.laplace(s) * self.filter(s)

    def with_slope(self, s: ArrayLike) -> tuple[Complex, Complex]:
        value, slope = self.law.with_slope(s)
        filtered = self.filter(s)
        later = self.gap * (filtered / (1 - self.momentum) - 1)
        return value * filtered, (slope - value * later) * filtered

    def scaled(self, factor: float) -> Smeared:
        return Smeared(self.law.scaled(factor), self.momentum, self.gap * factor)


def pool(laws: Sequence[Samples], weights: Sequence[float]) -> Samples:
    """The law of gradients of unlike workers, each worker weighted by how many it sends."""
    times = [time for law in laws for time in law.times]
    shares = [w / len(law.times) for law, w in zip(laws, weights, strict=True) for _ in law.times]
    return Samples.of(times, shares)


def _bin_means(values: NDArray[np.float64], shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Means of equally likely bins; a value on an edge is split between its two bins."""
    below = np.concatenate(([0.0], np.cumsum(shares)))
    sums = np.concatenate(([0.0], np.cumsum(shares * values)))
    edges = np.linspace(0.0, below[-1], BINS + 1)
    return np.asarray(np.diff(np.interp(edges, below, sums)) * BINS / below[-1], float)


def _mean(values: Complex) -> Complex:
    return np.asarray(values.mean(-1), np.complex128)


def _complex(s: ArrayLike) -> Complex:
    return np.asarray(s, np.complex128)


def _exp(power: Complex) -> Complex:
    """exp, without overflow: far left of the imaginary axis only the sign of a sum matters."""
    return np.asarray(np.exp(np.minimum(power.real, _LARGEST) + 1j * power.imag), np.complex128)
