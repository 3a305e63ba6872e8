"""What looking up in split embedding tables has cost: as workers tell it, and added up."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Lookups(msgspec.Struct, frozen=True):
    """What looking up in embedding tables has cost one worker, over some lookups."""

    count: int
    """Lookups of a batch."""
    ids: int
    """That this worker was asked for, by all of its group."""
    lookup_s: float
    """Reading and adding up rows."""
    latency_s: float
    """From ids to sums, with all waiting: what a training step sees."""
    longest_s: float

    def and_then(self, other: Lookups) -> Lookups:
        """With further lookups of the same worker."""
        return Lookups(
            self.count + other.count,
            self.ids + other.ids,
            self.lookup_s + other.lookup_s,
            self.latency_s + other.latency_s,
            max(self.longest_s, other.longest_s),
        )


class LookupSummary(msgspec.Struct, frozen=True):
    """What looking up in embedding tables came to. Lists are per worker, rank 0 first."""

    ids: list[int]
    """Looked up by each, for all of its group."""
    lookup_ms: list[float]
    """Reading rows, for one batch of the group, on the mean."""
    latency_ms: float
    """From ids to sums, as a training step sees it: the mean of all."""
    longest_ms: float
    imbalance: float
    """The most ids that a worker has looked up, as a multiple of the mean: 1 is even."""
    straggler: int
    """Whose lookups take longest: the others of its group wait for it."""
    straggler_factor: float
    """How many times longer they take than those of all on the mean."""


def sum_up(told: Mapping[int, Lookups], workers: int) -> LookupSummary:
    """What all workers told of their lookups."""
    ranks = range(workers)
    none = Lookups(0, 0, 0.0, 0.0, 0.0)
    each = [told.get(rank, none) for rank in ranks]
    ids, count = [one.ids for one in each], sum(one.count for one in each)
    took = [1000 * one.lookup_s / max(one.count, 1) for one in each]
    slowest = max(ranks, key=lambda rank: took[rank])
    return LookupSummary(
        ids=ids,
        lookup_ms=took,
        latency_ms=1000 * sum(one.latency_s for one in each) / max(count, 1),
        longest_ms=1000 * max(one.longest_s for one in each),
        imbalance=max(ids) * workers / max(sum(ids), 1),
        straggler=slowest,
        straggler_factor=took[slowest] * workers / max(sum(took), 1e-12),
    )
