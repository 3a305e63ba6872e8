"""Which plan to take where measured times cannot tell several apart: the simplest. Called by the scheduler.

All operators replicated, then all sharded, then mixed: with the fewest bytes moved, which needs no times at
all, and last the fastest by the medians. A simpler plan is taken unless it is slower even if its transfers
take as little as one in ten repeats did, and the fastest plan's as much as one in ten. Only operators that
the two treat differently count. Times that were not measured have no such range: then the simpler plan is
taken only if it is no slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from paceline.plan.osdp.knapsack import Solution, measured, solve
from paceline.plan.osdp.options import Option, OsdpCosts
from paceline.plan.profile import ModelProfile, TransferCost
from paceline.plan.profile.cluster import KINDS, Kind

EQUAL = 1e-9
"""Times that differ by less, relative, are the same."""


class ChosenPlan(NamedTuple):
    """A plan, and what it was taken instead of."""

    found: Solution
    name: str = ""
    """Of the simpler plan; empty if the fastest was taken."""
    fastest_s: float = 0.0
    """What the fastest plan takes by the medians."""


class Chooser:
    """For one model, cluster and batch size."""

    def __init__(self, profile: ModelProfile, costs: OsdpCosts) -> None:
        self.costs = costs
        self._options = [costs.options(op) for op in profile.operators]
        self._profile = profile
        self._low, self._high = self._at(costs.cluster.low), self._at(costs.cluster.high)

    def _at(self, ends: dict[Kind, TransferCost]) -> list[dict[Option, float]]:
        """What every option takes at one end of the range."""
        other = self.costs._replace(cluster=self.costs.cluster.at(ends))
        priced = [other.options(op) for op in self._profile.operators]
        return [
            {option: then.seconds for option, then in zip(*both, strict=True)}
            for both in zip(self._options, priced, strict=True)
        ]

    def choose(self, fastest: Solution, room: int) -> ChosenPlan:
        """The simplest plan that is as fast, as far as one can tell."""
        for name, plan in self._simpler(room):
            if plan.memory <= room and not self.surely_slower(plan, fastest):
                if plan.seconds <= fastest.seconds * (1 + EQUAL):
                    return ChosenPlan(plan)
                return ChosenPlan(plan, name, fastest.seconds)
        return ChosenPlan(fastest)

    def range(self, plan: Solution) -> tuple[float, float]:
        """Seconds of a step with all transfers at the low end, and at the high end."""
        low, high = self._ends(plan)
        return sum(low), sum(high)

    def surely_slower(self, plan: Solution, other: Solution) -> bool:
        """Whether a plan is slower than another one wherever in their ranges transfers are."""
        low, high = self._ends(plan)[0], self._ends(other)[1]
        pairs = zip(plan.chosen, other.chosen, strict=True)
        differ = [place for place, (one, another) in enumerate(pairs) if one != another]
        least, most = sum(low[place] for place in differ), sum(high[place] for place in differ)
        return least > most + EQUAL * other.seconds

    def _ends(self, plan: Solution) -> tuple[list[float], list[float]]:
        chosen = list(enumerate(plan.chosen))
        return [self._low[place][o] for place, o in chosen], [self._high[place][o] for place, o in chosen]

    def _simpler(self, room: int) -> Iterator[tuple[str, Solution]]:
        if "dp" in self.costs.modes:
            yield "all replicated", measured([each[0] for each in self._options])
        if "zdp" in self.costs.modes:
            yield "all sharded", measured([_sharded(each) for each in self._options])
        if not self.costs.cluster.low:  # one time each: the fastest is known
            return
        moving = [_moving_alone(self.costs).options(op) for op in self._profile.operators]
        fewest = solve(moving, room)
        if fewest is not None:
            places = [each.index(option) for each, option in zip(moving, fewest.chosen, strict=True)]
            chosen = [each[place] for each, place in zip(self._options, places, strict=True)]
            yield "the mix that moves the fewest bytes", measured(chosen)


def _sharded(each: Sequence[Option]) -> Option:
    """All of the operator, in as few slices as may be; whole if it cannot be sharded."""
    return min((o for o in each if o.mode == "zdp"), key=lambda o: o.slices, default=each[0])


def _moving_alone(costs: OsdpCosts) -> OsdpCosts:
    """Prices that know bytes only."""
    by_byte = TransferCost(latency_s=0.0, bytes_per_s=1.0)
    twice = TransferCost(latency_s=0.0, bytes_per_s=0.5)
    lines = {kind: twice if kind == "all_reduce" else by_byte for kind in KINDS}
    return costs._replace(cluster=costs.cluster.at(lines), overlap=False, launch_s=0.0)
