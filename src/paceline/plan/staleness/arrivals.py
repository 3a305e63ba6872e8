"""How often gradients arrive, and how old they are, as a function of who takes part.

Paper: Yu, Chen, Poor, arXiv 2406.11159 (see `delays`). M busy workers with cycle times T_m send
sum 1 / E[T_m] gradients per second, which for many workers is nearly a Poisson stream; by Little's
law arrivals * delay = M whatever the law and whatever queues are inside, and a gradient is M - 1
updates old in the mean.

What is modelled: the store (or a link all share) serves one gradient at a time. The wait for it
comes from mean-value analysis of the closed queue, exact for like workers and random service; for
unlike workers one mean cycle stands for all, and everybody waits equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.errors import ConfigError
from paceline.plan.staleness.delays import DelayLaw, Mixture, Samples, pool


def queued_rate(workers: int, off_s: float, shared_s: float) -> float:
    """Arrivals per second by mean-value analysis: a cycle is `off_s` off the resource, `shared_s` on it."""
    rate = queue = 0.0
    for count in range(1, workers + 1):
        there_s = shared_s * (1 + queue)
        rate = count / (off_s + there_s)
        queue = rate * there_s
    return rate


def saturation(off_s: float, shared_s: float) -> float:
    """How many workers keep the shared resource always busy."""
    return (off_s + shared_s) / shared_s if shared_s > 0 else inf


@dataclass(frozen=True, slots=True)
class Flow:
    """The stream of gradients of some workers."""

    workers: int
    per_s: float
    """Arrivals per second."""
    law: DelayLaw
    """The delay of an arriving gradient, in seconds; its mean is workers / per_s."""

    @classmethod
    def ideal(cls, workers: int, law: DelayLaw) -> Flow:
        """Like workers that share nothing."""
        return cls(workers, workers / law.mean, law)

    @property
    def delay_s(self) -> float:
        """E[D], by Little's law."""
        return self.workers / self.per_s


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """The workers there are: each one's cycle when nobody else is there."""

    cycles: tuple[DelayLaw, ...]
    """By rank: read, compute, push, be served, in seconds."""
    shared_s: float = 0.0
    """Seconds of each cycle on what all share: the store, or one link."""

    def __post_init__(self) -> None:
        if not self.cycles:
            raise ConfigError("an advisor needs at least one worker, got none. Record a run with iterations.")
        fastest = min(law.mean for law in self.cycles)
        if not 0 <= self.shared_s <= fastest * (1 + 1e-9):
            raise ConfigError(
                f"the shared resource takes {self.shared_s:g} s per gradient, but the fastest worker's whole "
                f"cycle takes {fastest:g} s. The shared time is a part of the cycle: give less."
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Fastest first: whoever is parked is parked from the end."""
        return tuple(sorted(range(len(self.cycles)), key=lambda rank: self.cycles[rank].mean))

    @property
    def most(self) -> int:
        """Workers beyond which the shared resource is saturated: more only add staleness."""
        cycle_s = len(self.cycles) / sum(1 / law.mean for law in self.cycles)
        return min(len(self.cycles), _ceil(saturation(cycle_s - self.shared_s, self.shared_s)))

    def stretched(self, factor: float) -> WorkerSet:
        """The same workers, with so many times as long between two turns at what all share."""
        return WorkerSet(tuple(_stretched(law, self.shared_s, factor) for law in self.cycles), self.shared_s)

    def flow(self, workers: int) -> Flow:
        """The stream of the fastest so many."""
        laws = [self.cycles[rank] for rank in self.ranks[:workers]]
        free = sum(1 / law.mean for law in laws)
        rate = queued_rate(workers, workers / free - self.shared_s, self.shared_s)
        wait_s = _wait_s([law.mean for law in laws], rate) if self.shared_s else 0.0
        return Flow(workers, rate, _together([_later(law, wait_s) for law in laws]))


def _stretched(law: DelayLaw, shared_s: float, factor: float) -> DelayLaw:
    if isinstance(law, Samples):
        return Samples(tuple(max(time - shared_s, 0.0) * factor + shared_s for time in law.times))
    return law.scaled(((law.mean - shared_s) * factor + shared_s) / law.mean)


def _wait_s(cycles_s: Sequence[float], rate: float) -> float:
    """The equal wait that brings the workers' free rate down to the one they have."""
    low, high = 0.0, len(cycles_s) / rate
    for _ in range(80):
        middle = (low + high) / 2
        if sum(1 / (cycle + middle) for cycle in cycles_s) > rate:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _later(law: DelayLaw, wait_s: float) -> DelayLaw:
    """The law with a wait: as a constant where times are measured, else by stretching."""
    if not wait_s:
        return law
    return law.shifted(wait_s) if isinstance(law, Samples) else law.scaled(1 + wait_s / law.mean)


def _together(laws: list[DelayLaw]) -> DelayLaw:
    """The delay of an arriving gradient: each worker's law, weighted by how many it sends."""
    counts: dict[DelayLaw, int] = {}
    for law in laws:
        counts[law] = counts.get(law, 0) + 1
    if len(counts) == 1:
        return laws[0]
    weights = [count / law.mean for law, count in counts.items()]
    measured = [law for law in counts if isinstance(law, Samples)]
    if len(measured) == len(counts):
        return pool(measured, weights)
    return Mixture(tuple(zip(weights, counts, strict=True)))


def _ceil(number: float) -> int:
    return 2**62 if number == inf else -int(-number // 1)
