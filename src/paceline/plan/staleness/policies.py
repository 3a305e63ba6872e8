"""What to choose: learning rate, active workers, group size.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`), which optimises the same and a staleness
threshold (`thresholds`).

Decisions of ours, where the paper is silent or its objective misleads:
- The rate per update *grows* with a little staleness (implicit momentum), so that with a saturated
  link the bare rate would still ask for more workers. No more are advised than saturate it, and the
  time to a target, which knows the error floor, is preferred to the bare rate.
- Unlike workers: only sets of the fastest so many are looked at. The slowest send least, and oldest.
- A change is advised only where it gains more than a few per cent: predictions are no better than that.
- What is advised keeps within a share of the bound for this delay law and for a constant delay, the
  least stable of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np

from paceline.config import RunConfig, Weighting
from paceline.plan.staleness.arrivals import Flow, WorkerSet
from paceline.plan.staleness.delays import DelayLaw, Samples
from paceline.plan.staleness.equation import Equation
from paceline.plan.staleness.outlook import (
    Direction,
    Outlook,
    critical_step,
    critical_step_constant,
    expect,
    predict,
    smooth_step,
)

SAFETY = 0.7
"""Share of the bound that advice keeps within."""
SAFE_LR = 0.5
"""Share of the bound that a learning rate counts as safe up to."""
WORTH_IT = 0.05
"""A change has to gain more than this share to be advised."""
ALL_COUNTS = 64
"""Up to so many workers every count is looked at; beyond, counts some per cent apart."""


@dataclass(frozen=True, slots=True)
class PolicyStep:
    """How far an update moves the weights."""

    lr: float
    momentum: float = 0.0
    weighting: Weighting = "sum"
    """As for a run: `mean` lets a push count 1 / active of a step, `sum` a whole one."""
    gradients: float = 1.0
    """How many gradients a push is the sum of, in the mean: more than one with `--trigger`."""

    def share(self, active: int, contributors: int = 1, flushed: bool = False) -> float:
        """How much of a whole step an update counts."""
        config = RunConfig(run="", folder="", weighting=self.weighting)
        return self.gradients * config.step_share(contributors, active, "mean" if flushed else None)

    def length(self, active: int) -> float:
        """The length of an update that applies one push."""
        return self.lr * self.share(active)

    def length_of_group(self, active: int, size: int) -> float:
        """The length of an update that flushes the mean of several pushes."""
        return self.lr * self.share(active, size, flushed=True)


@dataclass(frozen=True, slots=True)
class LearningRates:
    """What the sharpest direction allows, as the script writes its learning rate."""

    critical: float
    """Unstable from here on, under the given delay law."""
    critical_constant: float
    """The same under a constant delay: below this every delay law is stable."""
    safe: float
    """A share of the lower of the two."""
    smooth: float
    """Up to here the error falls without oscillating."""


def learning_rates(flow: Flow, curvature: float, step: PolicyStep, safety: float = SAFE_LR) -> LearningRates:
    """The range of learning rates for some workers; the learning rate of `step` itself is not used."""
    share, momentum = step.share(flow.workers), step.momentum
    critical = critical_step(flow, curvature, momentum) / share
    constant = critical_step_constant(flow, curvature, momentum) / share
    smooth = smooth_step(flow, curvature, momentum) / share
    return LearningRates(critical, constant, safety * min(critical, constant), smooth)


def survey(
    crew: WorkerSet,
    directions: Sequence[Direction],
    step: PolicyStep,
    target: float | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Outlook]:
    """What to expect of the fastest 1, 2, 3 ... workers, up to those that saturate what they share."""
    counts = _counts(crew.most)
    outlooks = []
    for number, workers in enumerate(counts):
        progress(number / len(counts))
        outlooks.append(outlook(crew, directions, step, workers, target))
    return outlooks


def outlook(
    crew: WorkerSet,
    directions: Sequence[Direction],
    step: PolicyStep,
    workers: int,
    target: float | None = None,
) -> Outlook:
    """What to expect of the fastest so many."""
    length = step.length(workers)
    return predict(crew.flow(workers), directions, length, momentum=step.momentum, target=target)


def best(outlooks: Iterable[Outlook], safety: float = 1.0) -> Outlook | None:
    """The soonest at the target, else the fastest, among those within the margin; None if there is none."""
    within = [o for o in outlooks if o.stable and o.margin <= safety]
    return min(within, key=_merit, default=None)


class Promise(Protocol):
    """What choices are compared by."""

    @property
    def margin(self) -> float: ...
    @property
    def rate_per_s(self) -> float: ...
    @property
    def seconds_to_target(self) -> float | None: ...


def is_worth_it(new: Promise, old: Promise, safety: float) -> bool:
    """Whether a change gains more than a few per cent, or leads back within the margin."""
    if old.margin > safety or old.rate_per_s <= 0:
        return True
    if new.seconds_to_target is not None and old.seconds_to_target is not None:
        return new.seconds_to_target < (1 - WORTH_IT) * old.seconds_to_target
    return new.rate_per_s > (1 + WORTH_IT) * old.rate_per_s


def group_survey(
    flow: Flow, directions: Sequence[Direction], step: PolicyStep, target: float | None = None
) -> dict[int, Outlook]:
    """By group size: K gradients averaged per update, and nobody waits (K-batch-async)."""
    workers, momentum = flow.workers, step.momentum
    sizes = sorted({*range(1, min(workers, 8) + 1), *_halvings(workers)})
    lengths = {size: step.length_of_group(workers, size) for size in sizes}
    return {
        size: predict(flow, directions, length, momentum=momentum, group=size, target=target)
        for size, length in lengths.items()
    }


def lockstep(
    crew: WorkerSet, directions: Sequence[Direction], step: PolicyStep, target: float | None = None
) -> Outlook:
    """All workers, each waiting for the slowest (BSP): no staleness, rounds as long as the longest cycle."""
    workers = len(crew.cycles)
    round_s = max(longest_s(crew.cycles), workers * crew.shared_s)
    flow = Flow(workers, workers / round_s, crew.cycles[0])
    fresh = Equation.without_staleness(step.momentum)
    length = step.length_of_group(workers, workers)
    return expect(flow, fresh, fresh.critical, directions, length, workers, 1 / round_s, 0.0, target)


def longest_s(laws: Sequence[DelayLaw]) -> float:
    """E[max] of independent cycles; a law that was not measured counts as constant."""
    counts: dict[Samples, int] = {}
    for law in laws:
        measured = law if isinstance(law, Samples) else Samples((law.mean,))
        counts[measured] = counts.get(measured, 0) + 1
    times = np.unique(np.concatenate([law.times for law in counts]))
    all_below = np.ones(len(times))
    for law, count in counts.items():
        below = np.searchsorted(np.sort(law.times), times, side="right") / len(law.times)
        all_below *= below**count
    return float(np.diff(all_below, prepend=0.0) @ times)


def _merit(outlook: Outlook) -> tuple[float, float, int]:
    seconds = outlook.seconds_to_target
    return (inf if seconds is None else seconds, -outlook.rate_per_s, outlook.workers)


def _counts(most: int) -> list[int]:
    if most <= ALL_COUNTS:
        return list(range(1, most + 1))
    spaced = np.geomspace(ALL_COUNTS, most, 48).round().astype(int).tolist()
    return sorted({*range(1, ALL_COUNTS + 1), *spaced})


def _halvings(number: int) -> list[int]:
    return [number] if number <= 1 else [number, *_halvings(number // 2)]
