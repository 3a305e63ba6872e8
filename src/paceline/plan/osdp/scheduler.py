"""OSDP's scheduler: the best plan for every batch size that fits, and of those the one with most samples
per second.

The published code takes the batch size with the shortest step instead, which is always the smallest. Sizes
that cannot be the best by their bound are not searched; with many operators, sizes within `ROUGH` of the best
count as no better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile

import msgspec

from paceline.errors import ConfigError
from paceline.plan.osdp.bounds import Bounds
from paceline.plan.osdp.knapsack import MANY, ROUGH, Solution, smallest, solve
from paceline.plan.osdp.options import OsdpCosts, on_cluster
from paceline.plan.osdp.plan import OsdpPlan, make_plan
from paceline.plan.osdp.simplest import EQUAL, Chooser
from paceline.plan.profile import ClusterProfile, ModelProfile
from paceline.plan.profile.units import GIB, MIB, size_text

EVERY_BATCH = 32
"""Up to here every batch size is tried, then sizes an eighth apart."""
MOST_BATCH = 4096

Best = tuple[OsdpCosts, Solution]


def plan_osdp(
    profile: ModelProfile,
    cluster: ClusterProfile,
    limit: int | None = None,
    batch: int | None = None,
    *,
    progress: Callable[[int], None] = lambda batch: None,
    **ways: object,
) -> OsdpPlan:
    """The plan for a model, a cluster and a memory limit per device. `batch`: for just this size. Of plans
    that measured times cannot tell apart, the simplest.

    `ways` are fields of `OsdpCosts`: modes, slices, split, launch_s, overlap.
    """
    limit = cluster.memory_bytes if limit is None else limit
    profile = on_cluster(profile, cluster)
    _check_names(profile, ways.get("split"))
    costs = OsdpCosts(cluster, 1, profile.state_copies)._replace(**ways)  # type: ignore[arg-type]
    best = _schedule(profile, costs, limit, batch, progress)
    if best is None:
        raise _nothing_fits(profile, costs._replace(batch=batch or 1), limit)
    plan, chosen = _chosen(profile, best, limit)
    more = _schedule(profile, costs, limit + GIB, batch, progress)
    if more is not None:
        larger, then = _chosen(profile, more, limit + GIB)
        faster = larger.predicted.samples_per_s > plan.predicted.samples_per_s * (1 + EQUAL)
        if larger.batch == plan.batch:
            faster = faster and Chooser(profile, more[0]).surely_slower(chosen, then)
        if faster:
            plan = msgspec.structs.replace(plan, next_gib=larger.predicted)
    return plan


def _chosen(profile: ModelProfile, best: Best, limit: int) -> tuple[OsdpPlan, Solution]:
    """The simplest of the plans that may be the fastest."""
    costs, fastest = best
    chooser = Chooser(profile, costs)
    choice = chooser.choose(fastest, limit - costs.cluster.overhead_bytes)
    return make_plan(profile, costs, limit, chooser, choice), choice.found


def _schedule(
    profile: ModelProfile, costs: OsdpCosts, limit: int, batch: int | None, progress: Callable[[int], None]
) -> Best | None:
    """The most promising batch sizes first, and none that cannot beat the best one found."""
    room, best = limit - costs.cluster.overhead_bytes, None
    bounds = Bounds([costs.options(op) for op in profile.operators], profile, costs)
    sizes = [batch] if batch is not None else list(takewhile(lambda b: bounds.fits(b, room), _batches()))
    slack = 1 + (ROUGH if len(profile.operators) > MANY else 0.0)
    for size in sorted(sizes, key=lambda size: (-bounds.rate(size, room), size)):
        if best is not None and bounds.rate(size, room) <= _rate(*best) * slack:
            break
        progress(size)
        tried = costs._replace(batch=size)
        found = solve([tried.options(op) for op in profile.operators], room)
        if found is not None and (best is None or _rate(tried, found) > _rate(*best)):
            best = tried, found
    return best


def _batches() -> Iterator[int]:
    size = 1
    while size <= MOST_BATCH:
        yield size
        size += 1 if size < EVERY_BATCH else size // 8


def _rate(costs: OsdpCosts, found: Solution) -> float:
    return costs.batch / found.seconds if found.seconds else float("inf")


def _nothing_fits(profile: ModelProfile, costs: OsdpCosts, limit: int) -> ConfigError:
    least = smallest([costs.options(op) for op in profile.operators]) + costs.cluster.overhead_bytes
    rounded, smaller = -(-least // MIB), " a smaller --batch," if costs.batch > 1 else ""
    return ConfigError(
        f"nothing fits into {size_text(limit)} per device with a batch of {costs.batch}: the smallest plan "
        f"takes {size_text(least)} ({size_text(costs.cluster.overhead_bytes)} of it overhead). "
        f"Use --memory {rounded}MiB or more,{smaller} more workers, or --slices."
    )


def _check_names(profile: ModelProfile, split: object) -> None:
    from paceline.errors import unknown

    names = [op.name for op in profile.operators]
    for name in split if isinstance(split, dict) else ():
        if name not in names:
            raise unknown("operator to split:", name, names)
