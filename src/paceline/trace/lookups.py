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


def sum_up(told: Mapping[int, list[Lookups]], workers: int) -> LookupSummary:
    """What all workers told of their lookups."""
    ranks = range(workers)
    ids = [sum(each.ids for each in told.get(rank, ())) for rank in ranks]
    counts = [sum(each.count for each in told.get(rank, ())) for rank in ranks]
    own = [sum(each.lookup_s for each in told.get(rank, ())) for rank in ranks]
    took = [1000 * spent / max(count, 1) for spent, count in zip(own, counts, strict=True)]
    every = [each for lookups in told.values() for each in lookups]
    slowest = max(ranks, key=lambda rank: took[rank])
    return LookupSummary(
        ids=ids,
        lookup_ms=took,
        latency_ms=1000 * sum(each.latency_s for each in every) / max(sum(counts), 1),
        longest_ms=1000 * max(each.longest_s for each in every),
        imbalance=max(ids) * workers / max(sum(ids), 1),
        straggler=slowest,
        straggler_factor=took[slowest] * workers / max(sum(took), 1e-12),
    )
