"""Local SGD: workers train alone, and average their models every so many iterations.

Paper: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019; the warm-up and the late
start as in Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020 (post-local SGD).

Promise: all replicas are equal after every averaging, one per `period` iterations.

Invariant: an averaging leaves the mean of the replicas as it was. With period=1 this is BSP for SGD,
with momentum and weight decay too (the update is linear), but not for Adam. The model is averaged
after iterations period, 2*period, ...; float buffers with it. The optimizer's state stays every
worker's own, and is kept across averagings unless `optimizer` says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Compute, Reset, Step, Steps
from paceline.protocols.core.peer import Me, Peer, average_optimizer
from paceline.protocols.peer.outer import adopt, begin, check_period, displacement, move, take_mean


@dataclass(frozen=True, slots=True)
class LocalSGD(Peer):
    period: int = 8
    """Iterations between two averagings. Larger sends less, and lets replicas drift further apart."""
    every_until: int = 0
    """Average after every iteration up to this one, and with the period from then on (post-local SGD)."""
    warmup: int = 0
    """Iterations, after `every_until`, over which the period grows from 1 to its full length."""
    optimizer: Literal["keep", "average", "reset"] = "keep"
    """What becomes of momentum and the like at an averaging: every worker keeps its own, all get the mean
    (which sends as much again for every vector that the optimizer remembers), or it is forgotten."""

    by_samples: bool = False
    """Weigh every worker's model by its samples since the last averaging; else all count alike."""

    def __post_init__(self) -> None:
        check_period("local SGD", self.period)
        if self.every_until < 0 or self.warmup < 0:
            raise ConfigError(
                f"every_until and warmup are numbers of iterations >= 0, got {self.every_until} "
                f"and {self.warmup}."
            )

    @property
    def plain_alone(self) -> bool:
        return self.optimizer != "reset"

    def start(self, me: Me) -> None:
        begin(me)
        me.agreed.since = me.private.samples = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        me.agreed.since += 1
        me.private.samples += me.samples
        if me.agreed.since >= self.period_at(me.count + 1):
            weight = me.private.samples if self.by_samples else 1.0
            me.agreed.since = me.private.samples = 0
            yield from move(me, displacement(me), take_mean, weight=weight)
            adopt(me)
            if self.optimizer == "reset":
                yield Reset()
            elif self.optimizer == "average":
                yield from average_optimizer(me)

    def period_at(self, iteration: int) -> int:
        """The period in force at an iteration, counted from 1."""
        grown = iteration - self.every_until
        if grown <= 0:
            return 1
        if grown >= self.warmup:
            return self.period
        return max(1, self.period * grown // self.warmup)
