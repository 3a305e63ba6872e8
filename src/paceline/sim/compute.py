"""How long one iteration takes a worker: one small class per distribution.

A model draws a block of times at once from the generator it is given, so that a worker's times
depend on that worker's own stream and on nothing else. `spread` is always the standard deviation
as a share of the mean, so that 0.1 means ten per cent whatever the distribution.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, log, pi, sqrt
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError
from paceline.trace import read_trace
from paceline.trace.events import AnyEvent, Decided, RunStarted

Times = NDArray[np.float64]
HALF_NORMAL = sqrt(pi / 2 - 1)
"""The spread of the absolute value of a normal variable around zero."""


def require(ok: bool, what: str, value: object, remedy: str) -> None:
    """Refuse a value in one sentence: what it is, what it was, what to do."""
    if not ok:
        raise ConfigError(f"{what}, got {value!r}. {remedy}")


class ComputeTime(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Seconds per iteration, before a rank's slow factor and slow phases."""

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        """The next `size` iterations of a rank."""
        raise NotImplementedError


def _check_mean(model: str, mean_s: float) -> None:
    ok = isfinite(mean_s) and mean_s > 0
    require(ok, f"{model} compute mean_s must be > 0", mean_s, "Give the seconds of a usual iteration.")


class Fixed(ComputeTime, frozen=True):
    """Always the same."""

    mean_s: float

    def __post_init__(self) -> None:
        _check_mean("fixed", self.mean_s)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        return np.full(size, self.mean_s)


class Normal(ComputeTime, frozen=True):
    """Symmetric jitter. Times are cut off at a tenth of the mean: nothing takes negative time."""

    mean_s: float
    spread: float = 0.1

    def __post_init__(self) -> None:
        _check_mean("normal", self.mean_s)
        remedy = "Use kind = 'lognormal' for more: beyond 0.3 the cut at zero would bend the mean."
        require(0 <= self.spread <= 0.3, "normal compute spread must be in 0..0.3", self.spread, remedy)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        times = rng.normal(self.mean_s, self.spread * self.mean_s, size)
        return np.maximum(times, 0.1 * self.mean_s)


class Lognormal(ComputeTime, frozen=True):
    """Jitter with a longer tail to the slow side, as most machines show."""

    mean_s: float
    spread: float = 0.1

    def __post_init__(self) -> None:
        _check_mean("lognormal", self.mean_s)
        _check_spread("lognormal", self.spread)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        return _lognormal(rng, size, self.mean_s, self.spread)


class Exponential(ComputeTime, frozen=True):
    """A least time, plus an exponential delay: the usual model of shared machines.

    With spread 1 there is no least time, and the delay is all.
    """

    mean_s: float
    spread: float = 1.0

    def __post_init__(self) -> None:
        _check_mean("exponential", self.mean_s)
        remedy = "Use 1 for a pure exponential, or kind = 'lognormal' or 'pareto' for a longer tail."
        require(0 <= self.spread <= 1, "exponential compute spread must be in 0..1", self.spread, remedy)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        delay = rng.exponential(self.spread * self.mean_s, size)
        return delay + (1.0 - self.spread) * self.mean_s


class HalfNormal(ComputeTime, frozen=True):
    """A least time, plus the size of a normal delay: mostly short, rarely long, with a lighter tail than an
    exponential one. With the largest spread there is no least time."""

    mean_s: float
    spread: float = 0.1

    def __post_init__(self) -> None:
        _check_mean("halfnormal", self.mean_s)
        ok, remedy = 0 <= self.spread <= HALF_NORMAL, "Use kind = 'exponential' or 'lognormal' for more."
        require(ok, f"halfnormal compute spread must be in 0..{HALF_NORMAL:.4g}", self.spread, remedy)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        delay_s = self.spread / HALF_NORMAL * self.mean_s  # on the mean: what is left of the mean is certain
        delays: Times = np.abs(rng.normal(0.0, delay_s * sqrt(pi / 2), size))
        return delays + (self.mean_s - delay_s)


class Pareto(ComputeTime, frozen=True):
    """Lognormal jitter, and now and then a straggling iteration that takes far longer.

    With `probability` an iteration is multiplied by a Pareto factor of at least 1. `mean_s` and
    `spread` are those of the iterations that do not straggle.
    """

    mean_s: float
    spread: float = 0.1
    probability: float = 0.05
    shape: float = 1.5

    def __post_init__(self) -> None:
        _check_mean("pareto", self.mean_s)
        _check_spread("pareto", self.spread)
        odds, remedy = self.probability, "0.05 lets one iteration in twenty straggle."
        require(0 <= odds <= 1, "pareto compute probability must be in 0..1", odds, remedy)
        remedy = "Larger is milder; at 1 or less the mean is infinite and a run may never end."
        ok = isfinite(self.shape) and self.shape > 1
        require(ok, "pareto compute shape must be > 1", self.shape, remedy)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        times = _lognormal(rng, size, self.mean_s, self.spread)
        straggles = rng.random(size) < self.probability
        return times * np.where(straggles, 1.0 + rng.pareto(self.shape, size), 1.0)


class Recorded(ComputeTime, frozen=True):
    """The iterations a real run measured, drawn again at random, rank by rank.

    A rank beyond the recorded ones takes the profile of the recorded rank it folds onto.
    """

    run: str
    times_s: tuple[tuple[float, ...], ...]
    """Per recorded rank, every measured iteration."""

    def __post_init__(self) -> None:
        ok = any(self.times_s) and all(min(times, default=1.0) > 0 for times in self.times_s)
        remedy = "Record a run first, with at least one completed iteration."
        require(ok, "recorded compute needs measured iterations", self.run, remedy)

    def draw(self, rng: np.random.Generator, size: int, rank: int) -> Times:
        known = [times for times in self.times_s if times]
        times = np.asarray(known[rank % len(known)])
        return times[rng.integers(len(times), size=size)]

    @classmethod
    def from_trace(cls, run: Path) -> Recorded:
        """The profile of a run folder or trace file."""
        return cls.from_events(str(run), with_batches_alike(read_trace(run)))

    @classmethod
    def from_events(cls, run: str, events: Iterable[AnyEvent]) -> Recorded:
        """The profile of a run, from its events."""
        times: dict[int, list[float]] = {}
        for event in events:
            if isinstance(event, Decided) and event.pushed is not None and event.compute_s > 0:
                times.setdefault(event.pushed, []).append(event.compute_s)
        ranks = range(max(times, default=-1) + 1)
        return cls(run, tuple(tuple(times.get(rank, ())) for rank in ranks))


def with_batches_alike(events: Iterable[AnyEvent]) -> list[AnyEvent]:
    """A run's events; of a balanced one, its pushes as they would be had all batches been of the mean size.

    With balance all iterations take equally long: how fast a worker is stands in its time per sample.
    """
    told = list(events)
    pushes = [event for event in told if isinstance(event, Decided) and event.samples]
    if not pushes or not any(isinstance(event, RunStarted) and event.balance for event in told):
        return told
    batch = max(1, round(sum(push.samples for push in pushes) / len(pushes)))
    return [_with_batch(e, batch) if isinstance(e, Decided) and e.samples else e for e in told]


def _with_batch(push: Decided, batch: int) -> Decided:
    return msgspec.structs.replace(push, samples=batch, compute_s=push.compute_s * batch / push.samples)


KINDS: dict[str, type[ComputeTime]] = {
    "exponential": Exponential,
    "fixed": Fixed,
    "halfnormal": HalfNormal,
    "lognormal": Lognormal,
    "normal": Normal,
    "pareto": Pareto,
    "recorded": Recorded,
}


def _check_spread(model: str, spread: float) -> None:
    ok = isfinite(spread) and spread >= 0
    require(ok, f"{model} compute spread must be >= 0", spread, "0.1 is a jitter of ten per cent.")


def _lognormal(rng: np.random.Generator, size: int, mean_s: float, spread: float) -> Times:
    variance = log(1.0 + spread * spread)
    return rng.lognormal(log(mean_s) - variance / 2, sqrt(variance), size)
