"""Federated averaging: rounds of local training by clients that keep no state between rounds.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017.

Promise: after every round all replicas are the mean of the clients', weighted by their samples.

When: clients hold their own data and only models may travel.

Invariant: the weights of a round sum to 1. A round is `period` iterations here, not epochs of a client's own
data. With `fraction` below 1 (C in the paper) this share of the workers trains in a round; every worker draws
the same random selection. The others wait for the end of the round, use no data, and have no part in the
mean. All workers have equally many batches, so towards the end those that were drawn often have finished, and
the rounds consist of the others. The model is that of the last round; when the run ends, an unfinished round
counts as a round, too. The optimizer's state is reset after each round, because clients are stateless. With
plain SGD, equal batches and all workers in every round this is local SGD.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Agree, Compute, How, Reset, Step, Steps, Vector
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.peer.outer import adopt, begin, check_period, displacement, move, take_mean


@dataclass(frozen=True, slots=True)
class FedAvg(Peer):
    agrees: ClassVar[bool] = True

    period: int = 20
    """Iterations of a round."""
    fraction: float = 1.0
    """Share of the workers that train in a round, at least one. The others wait for its end."""

    def __post_init__(self) -> None:
        check_period("FedAvg", self.period)
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"FedAvg fraction is a share of the workers in (0, 1], got {self.fraction:g}. Use 1 for all."
            )

    @property
    def resumable(self) -> bool:
        return self.fraction == 1

    @property
    def plain_alone(self) -> bool:
        return False

    def start(self, me: Me) -> None:
        begin(me)
        me.private.samples = me.private.steps = me.private.before = 0
        me.agreed.round = 0

    def iteration(self, me: Me) -> Steps:
        while me.rank not in self.clients(me):
            yield from self.end_round(me, 0)
            me.private.before = 0
        gradient = yield Compute()
        yield Step(gradient)
        me.private.samples += me.samples
        me.private.steps += 1
        if me.private.steps == self.period:
            yield from self.end_round(me, me.private.samples)
            me.private.before, me.private.samples, me.private.steps = me.private.samples, 0, 0
            yield Reset()

    def end_round(self, me: Me, weight: float) -> Steps:
        """Set all replicas to the mean of the clients of this round."""
        yield from move(me, displacement(me), take_mean, weight=weight)
        adopt(me)
        me.agreed.round += 1

    def settle(self, me: Me) -> Steps:
        """A last round of whatever workers have begun. A worker that has begun nothing contributes its result
        of the round before."""
        latest = yield Agree(me.agreed.round, How.MAX)
        weight = me.private.samples or (me.private.before if me.agreed.round == latest else 0)
        yield from move(me, displacement(me), take_mean, weight=weight)
        if me.agreed.round == latest:
            adopt(me)
        me.private.samples = 0

    def stage(self, me: Me) -> int:
        return int(me.agreed.round)

    def model(self, me: Me) -> Vector:
        snapshot: Vector = me.agreed.snapshot
        return snapshot

    def clients(self, me: Me) -> tuple[int, ...]:
        """The workers that train in this round, by rank."""
        count = max(1, round(self.fraction * me.size))
        drawn = Random(f"{me.seed}/{me.agreed.round}").sample(range(me.size), count)
        return tuple(sorted(drawn))
