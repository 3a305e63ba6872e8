"""Federated averaging: rounds of local training by clients that remember nothing from one to the next.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017.

Promise: after every round all replicas are the mean of the clients', weighted by their samples.

Invariant: the weights of a round sum to 1. A round is `period` iterations here, not epochs of a
client's own data, and all workers take part in each (C = 1 in the paper): they are few, and waiting
anyway. The optimizer forgets its state after each round, because clients are stateless. With plain SGD
and equal batches this is local SGD.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.protocols.outer import adopt, begin, check_period, displacement, move, take_mean
from paceline.protocols.peer import Compute, Me, Peer, Reset, Step, Steps


@dataclass(frozen=True, slots=True)
class FedAvg(Peer):
    period: int = 20
    """Iterations of a round."""

    def __post_init__(self) -> None:
        check_period("FedAvg", self.period)

    @property
    def plain_alone(self) -> bool:
        return False

    def start(self, me: Me) -> None:
        begin(me)
        me.private.samples = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        me.private.samples += me.samples
        if (me.count + 1) % self.period == 0:
            samples, me.private.samples = me.private.samples, 0
            yield from move(me, displacement(me), take_mean, weight=samples)
            adopt(me)
            yield Reset()
