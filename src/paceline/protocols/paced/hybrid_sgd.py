"""Hybrid SGD ("smooth switch"): starts asynchronous and becomes synchronous, gradient by gradient.

Paper: Vora, Joshi, Patel, "Hybrid Approach to Parallel Stochastic Gradient Descent", 2024,
arXiv 2407.00101.

Promise: a step uses exactly as many gradients as the threshold says; it never falls, and never passes the
number of active workers.

When: you want the speed of asynchronous steps at the beginning and the accuracy of large synchronous
ones at the end.

A buffer collects gradients until it holds K(u) of them, then they make one step. The threshold K grows with
u, the number of gradients received so far, from `first` up to all active workers.

Invariant: 1 <= K <= active workers, and a flush has K gradients, or more if workers left with
theirs held. No gradient is lost or taken twice. threshold=constant with first=1 decides as ASP,
with first >= all workers and wait=in_buffer as BSP.

Step size of a flush: let `e` be the weight of one gradient under `asp` (`--weighting`: 1/active workers, or a
whole step). reduce=sum steps with the sum, at rate e; reduce=mean with the mean, at rate e x K, e x sqrt(K)
or e (`lr_scale`). So a sum at rate lr is a mean with lr_scale=none at rate lr x K, at every K, and with
lr_scale=K every gradient moves the weights as far as under `asp` and `bsp`. Optimizers that rescale their
gradient (Adam) tell a sum from a mean with lr_scale=K; SGD does not.

Where we differ: the paper uses `step` alone, h = 3 to 5 over the learning rate, and leaves open
whether a worker waits for the flush and whether gradients are summed or averaged; `wait` and
`reduce` offer both. Stale gradients of a flush count in full unless `--damping` says otherwise. A
buffer of one is applied at once. With wait=in_buffer the buffer is filled by those who wait, so that a
gradient left by a dead worker adds to a flush but does not hasten it. With wait=never a fast worker may
have several gradients in one flush.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from math import cos, pi
from typing import ClassVar, Literal

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks

_GATHER = Verdict(fate=Fate.HOLD)


@dataclass(frozen=True, slots=True)
class HybridSGD:
    lockstep: ClassVar[bool] = False

    threshold: Literal["step", "linear", "cosine", "exponential", "piecewise", "constant"] = "step"
    """How it grows: step and exponential by `h`, linear and cosine until `end`, piecewise by `points`."""
    first: int = 1
    """The threshold at the beginning; the only one if it is constant."""
    h: int = 300
    """How much of `count` it takes to raise the threshold: by one (step), or to the double (exponential)."""
    end: int = 7200
    """At which `count` the threshold reaches all active workers (linear, cosine)."""
    points: str = "300:2,600:4,1200:8"
    """Thresholds and the counts at which they begin (piecewise), as COUNT:THRESHOLD,...; `first` before
    them."""
    count: Literal["gradients", "flushes"] = "gradients"
    """What is counted: gradients received, or steps made."""
    reduce: Literal["mean", "sum"] = "mean"
    """What the step uses: the mean of the buffer's K gradients, or their sum."""
    lr_scale: Literal["K", "sqrt_K", "none"] = "K"
    """Factor on the step with a mean of K gradients: K (as far as their sum), sqrt(K) or none. A sum is not
    scaled."""
    wait: Literal["in_buffer", "never"] = "in_buffer"
    """Whether a worker waits until its gradient is applied, or continues with the old weights."""

    def __post_init__(self) -> None:
        for name in ("first", "h", "end"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"HybridSGD {name} must be >= 1, got {getattr(self, name)}. "
                    "Use threshold=constant for a threshold that stays as it is."
                )
        if self.reduce == "sum" and self.lr_scale != "K":
            raise ConfigError(
                f"HybridSGD lr_scale={self.lr_scale} scales a mean, and reduce=sum steps with the sum, which "
                "goes K times as far by itself. Use reduce=mean with it."
            )
        thresholds = [self.first, *_parsed(self.points)[1]]
        if self.threshold == "piecewise" and thresholds != sorted(thresholds):
            raise ConfigError(
                f"HybridSGD points={self.points!r} let the threshold fall from one to the next "
                f"(it begins with first={self.first}). Let it rise."
            )

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        alone = () if pushed is None else (pushed,)
        waits = self.wait == "in_buffer"
        gathered = clocks.waiting_count if waits else clocks.held + len(alone)
        count = clocks.pushes if self.count == "gradients" else clocks.version
        if gathered < self.needed(count, len(clocks.active)):
            return _GATHER if waits else Verdict(fate=Fate.HOLD, release=alone)
        if alone and gathered == 1 and not clocks.held:
            return Verdict(release=alone)
        flush, scale = self._step(clocks.held + len(alone), len(clocks.active))
        return Verdict(fate=Fate.HOLD, flush=flush, release=clocks.waiting(), lr_scale=scale)

    def _step(self, gradients: int, workers: int) -> tuple[Flush, float]:
        """How the buffer is flushed, and the factor on the step. A flush counts every gradient it
        contains."""
        if self.reduce == "sum":
            return Flush.SUM, 1.0
        if self.lr_scale == "K":
            return Flush.MEAN if gradients >= workers else Flush.PART, 1.0
        return Flush.PART, max(1, gradients) ** (-0.5 if self.lr_scale == "sqrt_K" else -1.0)

    def needed(self, count: int, workers: int) -> int:
        """K(u): how many gradients make a step."""
        first, share = self.first, min(1.0, count / self.end)
        match self.threshold:
            case "step":
                wanted = first + count // self.h
            case "linear":
                wanted = int(first + (workers - first) * share)
            case "cosine":
                wanted = int(first + (workers - first) * (1 - cos(pi * share)) / 2)
            case "exponential":
                wanted = int(first * 2.0 ** min(count / self.h, 64))
            case "piecewise":
                counts, thresholds = _parsed(self.points)
                wanted = (first, *thresholds)[bisect_right(counts, count)]
            case "constant":
                wanted = first
        return min(wanted, workers)


@cache
def _parsed(points: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The counts of `points`, ascending, and the threshold from each on."""
    try:
        pairs = sorted((int(count), int(threshold)) for count, threshold in _split(points))
    except ValueError:
        raise ConfigError(
            f"HybridSGD points={points!r} are not COUNT:THRESHOLD pairs. Write 300:2,600:4, say."
        ) from None
    return tuple(count for count, _ in pairs), tuple(threshold for _, threshold in pairs)


def _split(points: str) -> list[list[str]]:
    return [point.split(":") for point in points.split(",")]
