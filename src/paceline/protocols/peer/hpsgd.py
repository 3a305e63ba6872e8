"""HPSGD: the average of the last round travels while the next round is computed.

Paper: Zhou et al., "HPSGD: Hierarchical Parallel SGD With Stale Gradients Featuring", 2020 (arXiv
2009.02701).

Promise: no worker waits for bytes that travel within a round; every gradient moves the model exactly once.

When: averaging takes about as long as a few iterations, and workers should not wait for it.

Invariant: the agreed model (the snapshot) is the same on all workers after every merge, and moves by the mean
displacement of the round before. The replica then starts again from it; its own progress is in the
displacement that was just sent. With `blocking` there is no overlap: all wait for the average at the end of a
round, and this is local SGD with the round as its period.

With momentum it is heavy ball with a delay, which the paper does not have (its code is plain SGD). For rounds
of one and curvature c it is stable only for lr x c < 1 - momentum, where plain heavy ball allows 2 x (1 +
momentum); longer rounds allow less. Momentum on the agreed model instead of the workers' has the same bound:
z^2 - (1 + momentum) z + momentum + lr x c = 0 either way. Removing the delay helps: with `look_ahead` a round
starts at the agreed model plus the worker's own displacement that is under way. One worker, or workers with
equal gradients, then train exactly as plain PyTorch does.

With `delta_kind=grad_sum` sums of gradients are averaged, as in the published code, and a merge steps with
the learning rate at that time. A worker's sum is made of its steps, each divided by its rate. So it includes
clipping and weight decay, and with a constant rate the results equal those of displacements bit for bit. A
merge takes the smallest of the workers' rates, so that they agree.

Where this differs from the published code: the workers decide together whether a round is over (there every
rank checks by itself, and ranks may disagree). Displacements are averaged by default, so any optimizer and
schedule works. At the end the average under way is applied, then the rest, each once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    How,
    Start,
    Step,
    Steps,
    Test,
    Vector,
    Wait,
)
from paceline.protocols.core.peer import Me, Peer, average_buffers
from paceline.protocols.peer.outer import begin, take_mean


@dataclass(frozen=True, slots=True)
class HPSGD(Peer):
    round_length: int = 0
    """Iterations of a round. 0: a round ends when the average of the previous one has reached every
    worker."""
    look_ahead: bool = False
    """Start a round at the agreed model plus the worker's own displacement that is under way; the paper
    starts at the agreed model. For optimizers with momentum, which the delay makes unstable."""
    blocking: bool = False
    """Wait for the average at the end of each round, without overlap; for comparison. Needs a
    round_length."""
    delta_kind: Literal["displacement", "grad_sum"] = "displacement"
    """What is averaged: the worker's displacement in a round, or the sum of its gradients, with which a merge
    steps at its own rate. They differ when the rate changes. The sum is only for SGD without momentum."""

    def __post_init__(self) -> None:
        if self.round_length < 0:
            raise ConfigError(
                f"HPSGD round_length must be >= 0, got {self.round_length}. Use 0 to let the network decide."
            )
        if self.blocking and (self.look_ahead or not self.round_length):
            raise ConfigError(
                "HPSGD with blocking=true has nothing under way: it needs a round_length, and no look_ahead; "
                f"got round_length={self.round_length}, look_ahead={str(self.look_ahead).lower()}."
            )

        if self.delta_kind == "grad_sum" and self.look_ahead:
            raise ConfigError(
                "HPSGD look_ahead=true is for momentum, which delta_kind=grad_sum refuses. Leave one out."
            )

    def check_optimizer(self, name: str, momentum: float) -> None:
        if self.delta_kind == "grad_sum" and (name != "SGD" or momentum):
            raise ConfigError(
                "HPSGD delta_kind=grad_sum is defined for SGD without momentum only, got "
                f"{name} with momentum {momentum:g}. Use delta_kind=displacement."
            )

    @property
    def sends_ahead(self) -> bool:
        return not self.blocking

    @property
    def repeats(self) -> bool:
        return self.round_length > 0

    @property
    def plain_alone(self) -> bool:
        return False

    def caution(self, momentum: float) -> str:
        if not momentum or self.look_ahead or self.blocking:
            return ""
        return (
            f"hpsgd applies gradients a round late, and with momentum {momentum:g} that is stable only for "
            f"learning rate x curvature below {1 - momentum:g}, for longer rounds less. Use --set "
            "look_ahead=true, or no momentum"
        )

    def start(self, me: Me) -> None:
        begin(me)
        me.private.base = me.parameters.clone()
        me.private.under_way = None
        me.private.first_rates, me.private.factor, me.private.earlier = (), 1.0, None
        me.agreed.steps = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if self.delta_kind == "grad_sum":
            self.follow_rate(me)
        yield Step(gradient)
        me.agreed.steps += 1
        if (yield from self.over(me)):
            yield from self.next_round(me)

    def over(self, me: Me) -> Steps:
        """Whether the round is over, for every worker."""
        if self.round_length or me.private.under_way is None:
            return me.agreed.steps >= self.round_length
        arrived = yield Test(me.private.under_way)
        return (yield Agree(arrived, How.ALL))

    def next_round(self, me: Me) -> Steps:
        """Merge the average that has arrived, and send this round's result."""
        moved = self.moved(me)
        if me.private.under_way is not None:
            yield from self.merge(me, (yield Wait(me.private.under_way)))
            ahead = self.look_ahead
            me.parameters[:] = me.agreed.snapshot - moved if ahead else me.agreed.snapshot
        if self.blocking:
            yield from self.merge(me, (yield Average(moved)))
            me.parameters[:] = me.agreed.snapshot
        me.private.base[:] = me.parameters
        me.private.under_way = None if self.blocking else (yield Start(Average(moved)))
        me.agreed.steps = 0

    def moved(self, me: Me) -> Vector:
        """This round's result, in the form that is averaged."""
        memory, moved = me.private, me.private.base - me.parameters
        if memory.factor != 1:
            moved = moved * (1 / memory.factor)
        if memory.earlier is not None:
            moved, memory.earlier = memory.earlier + moved, None
        total: Vector = moved
        return total

    def follow_rate(self, me: Me) -> None:
        """Add up the steps made at the old rate before the next step uses another."""
        memory = me.private
        memory.first_rates = memory.first_rates or me.rates
        factor = rate_factor(me.rates, memory.first_rates)
        if factor != memory.factor:
            memory.earlier = self.moved(me)
            memory.base[:], memory.factor = me.parameters, factor

    def merge(self, me: Me, mean: Vector) -> Steps:
        """Move the agreed model by the average."""
        if self.delta_kind == "grad_sum":
            mean = mean.clone()  # it has to outlast the vote
            mean = mean * (yield Agree(me.private.factor, How.MIN))
        take_mean(me, mean)

    def settle(self, me: Me) -> Steps:
        """Apply what is under way, then the rest."""
        moved = self.moved(me)
        if me.private.under_way is not None:
            yield from self.merge(me, (yield Wait(me.private.under_way)))
            me.private.under_way = None
        yield from self.merge(me, (yield Average(moved)))
        me.parameters[:] = me.agreed.snapshot
        me.private.base[:] = me.parameters
        yield from average_buffers(me)

    def model(self, me: Me) -> Vector:
        snapshot: Vector = me.agreed.snapshot
        return snapshot


def rate_factor(rates: tuple[float, ...], first: tuple[float, ...]) -> float:
    """The current learning rates as a multiple of the first ones."""
    if not rates:
        return 1.0
    factor = rates[0] / first[0] if first[0] else 0.0
    if factor <= 0 or not all(isclose(now, factor * then) for now, then in zip(rates, first, strict=True)):
        raise ConfigError(
            "HPSGD delta_kind=grad_sum needs rates above 0 that change by one factor for all groups, "
            f"got {rates} after {first}. Use delta_kind=displacement."
        )
    return factor
