"""Local SGD: workers train alone and average their models every `period` iterations.

Paper: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; the warm-up and the late
start as in Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local SGD).

Promise: all replicas are equal after every averaging, one per `period` iterations.

When: links are slow and workers are about equal.

Invariant: an averaging leaves the mean of the replicas as it was. With period=1 this is BSP for SGD,
with momentum and weight decay too (the update is linear), but not for Adam. The model is averaged
after iterations period, 2*period, ...; float buffers with it. The optimizer's state stays every
worker's own, and is kept across averagings unless `optimizer` says otherwise.

Hierarchical (Lin et al.): with `group_size` workers also average within their group, every `group_period`
iterations since the last averaging of all. Groups are of neighbouring ranks: those of one host, say. Members
are equal after that, and the mean of a group, hence that of all, is left as it was. What optimizers remember
is averaged or reset when all meet, not within a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Average, Compute, Reset, Step, Steps
from paceline.protocols.core.peer import Me, Peer, average_buffers, average_optimizer
from paceline.protocols.peer.outer import adopt, begin, check_period, displacement, move, take_mean


@dataclass(frozen=True, slots=True)
class LocalSGD(Peer):
    period: int = 8
    """Iterations between two averagings. A larger value sends less and lets replicas drift further apart."""
    every_until: int = 0
    """Average after every iteration up to this one, then every `period` iterations (post-local SGD)."""
    warmup: int = 0
    """Iterations, after `every_until`, over which the period grows from 1 to its full length."""
    optimizer: Literal["keep", "average", "reset"] = "keep"
    """What happens to the optimizer's state (momentum and the like) at an averaging. keep: every worker keeps
    its own. average: all get the mean, which sends one more vector for each vector of state. reset: it is
    cleared."""

    by_samples: bool = False
    """Weight every worker's model by its samples since the last averaging; otherwise all count equally."""
    group_size: int = 0
    """Size of the groups of neighbouring ranks that average among themselves in between. 0: no groups."""
    group_period: int = 1
    """Iterations between two averagings within a group."""

    def __post_init__(self) -> None:
        check_period("local SGD", self.period)
        if self.every_until < 0 or self.warmup < 0:
            raise ConfigError(
                f"every_until and warmup are numbers of iterations >= 0, got {self.every_until} "
                f"and {self.warmup}."
            )
        if self.group_size < 0 or self.group_period < 1 or (self.group_period > 1 and not self.group_size):
            raise ConfigError(
                f"local SGD needs group_size >= 2 workers (0: no groups) and group_period >= 1, which is for "
                f"groups only; got {self.group_size} and {self.group_period}."
            )

    def check(self, workers: int) -> None:
        if self.group_size == 1 or self.group_size > workers > 1:
            raise ConfigError(
                f"local SGD in groups of group_size={self.group_size} does not suit {workers} workers. Use "
                f"2 to {workers}, or 0 for no groups."
            )

    @property
    def plain_alone(self) -> bool:
        return self.optimizer != "reset"

    @property
    def in_groups(self) -> bool:
        return self.group_size > 0

    def start(self, me: Me) -> None:
        begin(me)
        me.agreed.since = me.private.samples = me.private.of_group = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        me.agreed.since += 1
        me.private.samples += me.samples
        me.private.of_group += me.samples
        if me.agreed.since >= self.period_at(me.count + 1):
            weight = me.private.samples if self.by_samples else 1.0
            me.agreed.since = me.private.samples = me.private.of_group = 0
            yield from move(me, displacement(me), take_mean, weight=weight)
            adopt(me)
            if self.optimizer == "reset":
                yield Reset()
            elif self.optimizer == "average":
                yield from average_optimizer(me)
        elif self.group_size and me.agreed.since % self.group_period == 0:
            yield from self.average_group(me)

    def average_group(self, me: Me) -> Steps:
        """Average the models of this worker's group."""
        first = me.rank - me.rank % self.group_size
        group = tuple(range(first, min(first + self.group_size, me.size)))
        weight = me.private.of_group if self.by_samples else 1.0
        me.private.of_group = 0
        mean = yield Average(displacement(me), group, weight)
        me.parameters[:] = me.agreed.snapshot - mean
        yield from average_buffers(me, group, weight)

    def period_at(self, iteration: int) -> int:
        """The period in force at an iteration, counted from 1."""
        grown = iteration - self.every_until
        if grown <= 0:
            return 1
        if grown >= self.warmup:
            return self.period
        return max(1, self.period * grown // self.warmup)
