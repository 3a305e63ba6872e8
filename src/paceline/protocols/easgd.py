"""Elastic averaging SGD: every replica is tied to a common centre by a spring.

Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015.

Promise: no replica is forced onto another; the centre is pulled to the mean of all, and is the model.

Invariant: an exchange without gradients leaves the sum of all replicas and the centre as it was: what the
spring takes from one end it gives to the other. With beta=1 the centre becomes the mean exactly. The
first exchange is in the first iteration, as in the authors' code; both ends use the values from before
the local step. alpha is beta divided by the workers there are, so that it follows them. For EAMSGD give
the optimizer Nesterov momentum. In step with each other, all keep the centre themselves, so there is no
server. Asynchronously each exchanges with the one centre whenever it comes round, without waiting; there an
exchange is carried out as a whole (the authors' server takes no lock, and may hand out half an update).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.outer import begin, check_period, displacement, move
from paceline.protocols.peer import (
    CENTRE,
    Agree,
    Compute,
    Exchange,
    How,
    Me,
    Peer,
    Rule,
    Step,
    Steps,
    Vector,
)


@dataclass(frozen=True, slots=True)
class EASGD(Peer):
    period: int = 10
    """Iterations between two exchanges with the centre."""
    beta: float = 0.9
    """How far the centre goes to the mean of the replicas; each replica goes beta/workers to the centre."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether all exchange at the same time, or each when it comes round."""

    def __post_init__(self) -> None:
        check_period("EASGD", self.period)
        if not 0 <= self.beta <= 1:
            raise ConfigError(
                f"EASGD beta must be in [0, 1], got {self.beta:g}: beyond 1 the centre overshoots the mean."
            )

    @property
    def plain_alone(self) -> bool:
        return False

    def start(self, me: Me) -> None:
        begin(me)

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if me.count % self.period:
            yield Step(gradient)
            return
        if self.mode == "asynchronous":
            rate = self.beta / max(1, len(me.members))
            pull = yield Exchange(me.parameters, Rule.ELASTIC, CENTRE, rate=rate)
            yield Step(gradient)
            me.parameters[:] = me.parameters - pull
            return
        stretch = displacement(me)
        yield Step(gradient)
        workers = yield Agree(1, How.SUM)
        yield from move(me, stretch, self.pull_centre, remainder=None)  # the spring stays stretched
        me.parameters[:] = me.parameters + (self.beta / workers) * stretch

    def pull_centre(self, me: Me, mean: Vector) -> None:
        """The springs' pull on the centre."""
        me.agreed.snapshot[:] = me.agreed.snapshot - self.beta * mean

    @property
    def free(self) -> bool:
        return self.mode == "asynchronous"

    @property
    def repeats(self) -> bool:
        return self.mode == "synchronous"

    def cell(self, me: Me) -> int | None:
        return CENTRE if self.mode == "asynchronous" else None

    def model(self, me: Me) -> Vector:
        centre: Vector = me.agreed.snapshot
        return centre
