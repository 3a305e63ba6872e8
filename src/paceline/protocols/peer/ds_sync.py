"""DS-Sync: in each iteration workers average within small groups, and the groups are shuffled.

Paper: Wang et al., "DS-Sync: Addressing Network Bottlenecks with Divide-and-Shuffle Synchronization for
Distributed DNN Training", 2022 (arXiv 2007.03298).

Promise: no worker waits for another group; on a grid, all replicas are mixed with all after one cycle of
groupings.

When: an all-reduce over all workers is slow, but groups of a few average quickly.

Invariant: every grouping is a partition of the workers, the same on all of them. Members of a group are equal
after each iteration, including float buffers; the mean of all replicas does not change. Without gradients,
one cycle of a grid or hyper-grid gives every worker the exact mean. Parameters are averaged after the step.
Groups are formed from ranks 0 to size-1, without those that have left. The paper's code has four workers; the
general patterns are ours: rows and columns of a grid, digits of a number, or random groups. The paper chooses
groups that cross no bottleneck but does not say how. Here rows are hosts, as given, and a column has one
worker of each, so uplinks are shared evenly; with slower uplinks a column has more rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Compute, Step, Steps
from paceline.protocols.core.peer import Me, Peer, average_model
from paceline.protocols.rules.hosts import Grouping, cycle_of, parse_hosts


@dataclass(frozen=True, slots=True)
class DSSync(Peer):
    pattern: Literal["grid", "hypergrid", "random", "topology", "given"] = "grid"
    """How groups change: rows and columns in turn, one digit of the rank after another, at random, within and
    across the `hosts`, or as `groups` says."""
    group_size: int = 0
    """Workers in a group. 0 chooses a size near the square root of the number of workers (2 in a
    hyper-grid)."""
    groups: str = ""
    """Your own pattern, as 0,1|2,3;0,3|1,2: bars separate groups, semicolons separate groupings."""
    hosts: str = ""
    """Which workers share a host, as 0,1@0.1|2,3@0.1: bars separate hosts; the number after @ is the speed of
    the host's uplink relative to the links within it."""

    def __post_init__(self) -> None:
        if self.group_size < 0:
            raise ConfigError(
                f"DS-Sync group_size must be >= 0, got {self.group_size}. Use 0 to have it chosen."
            )
        if (self.pattern == "given") != bool(self.groups):
            raise ConfigError(
                f"pattern={self.pattern!r} and groups={self.groups!r} do not fit: "
                "give groups with pattern=given, and only then."
            )
        if (self.pattern == "topology") != bool(self.hosts) or (self.hosts and self.group_size):
            raise ConfigError(
                f"pattern={self.pattern!r}, hosts={self.hosts!r}, group_size={self.group_size} do not fit: "
                "give hosts with pattern=topology, only then, and no group_size: hosts are the groups."
            )
        _parse(self.groups)
        parse_hosts(self.hosts)

    def check(self, workers: int) -> None:
        if self.pattern == "random":
            _check_random(self._size(workers), workers)
            return
        cycle = self.cycle(workers)
        for grouping in cycle:
            _check_partition(grouping, workers)
        _check_mixing(cycle, workers)

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        grouping = self.grouping(me.size, me.count, me.seed)
        yield from average_model(me, next(group for group in grouping if me.rank in group))

    def grouping(self, workers: int, step: int, seed: int) -> Grouping:
        """The groups of one step, the same on every worker."""
        if self.pattern == "random":
            ranks, count = list(range(workers)), max(1, round(workers / self._size(workers)))
            Random(f"{seed}/{step}").shuffle(ranks)
            return [tuple(sorted(ranks[i::count])) for i in range(count)]
        cycle = self.cycle(workers)
        return cycle[step % len(cycle)]

    def cycle(self, workers: int) -> list[Grouping]:
        """The groupings that a pattern repeats."""
        if self.pattern == "given":
            return _parse(self.groups)
        if self.pattern == "topology":
            return cycle_of(parse_hosts(self.hosts))
        size = self._size(workers)
        if self.pattern == "grid":
            _check_divides(size, workers)
            rows = [tuple(range(first, first + size)) for first in range(0, workers, size)]
            columns = [tuple(range(column, workers, size)) for column in range(size)]
            return [rows, columns] if len(rows) > 1 else [rows]
        return [_along(digit, size, workers) for digit in range(_digits(size, workers))]

    def _size(self, workers: int) -> int:
        if self.group_size:
            return self.group_size
        if self.pattern == "hypergrid":
            return 2
        fitting = [m for m in range(1, workers + 1) if m * m >= workers and workers % m == 0]
        if self.pattern == "grid" and fitting[0] == workers > 3:
            raise ConfigError(
                f"{workers} workers make no grid: {workers} has no factor but 1 and itself. "
                "Use another number of workers, or pattern=random."
            )
        return fitting[0] if self.pattern == "grid" else min(workers, max(2, round(workers**0.5)))


def _digits(size: int, workers: int) -> int:
    digits, reached = 0, 1
    while reached < workers and size > 1:
        digits, reached = digits + 1, reached * size
    if reached != workers:
        raise ConfigError(
            f"a hyper-grid of groups of {size} needs a power of {size} workers, got {workers}. "
            "Choose another group_size, or pattern=random."
        )
    return max(1, digits)


def _along(digit: int, size: int, workers: int) -> Grouping:
    """Groups of ranks that differ in one digit only."""
    unit = size**digit
    firsts = [rank for rank in range(workers) if rank // unit % size == 0]
    return [tuple(range(first, min(first + unit * size, workers), unit)) for first in firsts]


def _parse(text: str) -> list[Grouping]:
    try:
        return [
            [tuple(sorted(int(rank) for rank in group.split(","))) for group in grouping.split("|")]
            for grouping in text.split(";")
            if grouping.strip()
        ]
    except ValueError:
        raise ConfigError(f"groups are written as 0,1|2,3;0,3|1,2, got {text!r}.") from None


def _check_divides(size: int, workers: int) -> None:
    if workers % size:
        raise ConfigError(
            f"groups of {size} do not divide {workers} workers. Choose a group_size that does, "
            "or pattern=random."
        )


def _check_random(size: int, workers: int) -> None:
    if size < 2 <= workers or size > workers:
        raise ConfigError(
            f"random groups of {size} of {workers} workers never mix them. "
            f"Choose a group_size from 2 to {workers}."
        )


def _check_partition(grouping: Grouping, workers: int) -> None:
    named = sorted(rank for group in grouping for rank in group)
    if named != list(range(workers)):
        raise ConfigError(
            f"the groups {grouping} are no partition of the {workers} workers: "
            f"name each of 0 to {workers - 1} once."
        )


def _check_mixing(cycle: list[Grouping], workers: int) -> None:
    """Refuse a pattern in which an update of one worker can never reach another."""
    reached = {0}
    for _ in range(workers):
        for grouping in cycle:
            reached |= {rank for group in grouping for rank in group if reached & set(group)}
    apart = set(range(workers)) - reached
    if apart:
        raise ConfigError(
            f"the pattern never mixes all workers: updates of rank 0 never reach rank {min(apart)}, so "
            "groups would train separate models. Add a grouping that joins them."
        )
