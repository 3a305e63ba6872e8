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

DeepSpark (Kim, Park, Jang, Yoon, 2016) is the asynchronous form with an adaptive period: a worker exchanges
after the step with which the training loss it has added up since its last exchange exceeds what it had
added up in its first `period` iterations. So the period grows to about period x first loss / loss, and a
worker whose loss rises talks more often. What is left at the end is exchanged then. Unlike DeepSpark's, the
distance of two exchanges is clamped (`shortest`, `longest`). The loss is what the script reported last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import (
    CENTRE,
    Agree,
    Compute,
    Exchange,
    How,
    Rule,
    Step,
    Steps,
    Vector,
)
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.peer.outer import begin, check_period, displacement, move


@dataclass(frozen=True, slots=True)
class EASGD(Peer):
    period: int = 10
    """Iterations between two exchanges with the centre."""
    beta: float = 0.9
    """How far the centre goes to the mean of the replicas; each replica goes beta/workers to the centre."""

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether all exchange at the same time, or each when it comes round."""
    adaptive: bool = False
    """Asynchronous only: exchange by added-up training loss; `period` then only calibrates it (DeepSpark)."""
    shortest: int = 1
    """Adaptive only: at least so many iterations between two exchanges."""
    longest: int = 0
    """Adaptive only: at most so many iterations between two exchanges; 0: ten periods."""

    def __post_init__(self) -> None:
        check_period("EASGD", self.period)
        if not 0 <= self.beta <= 1:
            raise ConfigError(
                f"EASGD beta must be in [0, 1], got {self.beta:g}: beyond 1 the centre overshoots the mean."
            )
        if self.adaptive and self.mode != "asynchronous":
            raise ConfigError(
                "EASGD with an adaptive period is asynchronous: workers differ in when they exchange. "
                "Set mode=asynchronous."
            )
        if not 1 <= self.shortest <= self.most:
            raise ConfigError(
                f"EASGD needs 1 <= shortest <= longest iterations between exchanges, got {self.shortest} and "
                f"{self.most}."
            )

    @property
    def plain_alone(self) -> bool:
        return False

    @property
    def most(self) -> int:
        """The longest way between two adaptive exchanges."""
        return self.longest or 10 * self.period

    def start(self, me: Me) -> None:
        begin(me)
        me.private.last, me.private.added, me.private.told = 0, 0.0, 0
        me.private.loss, me.private.threshold = None, None

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if self.adaptive:
            yield Step(gradient)
            if self.due(me):
                yield from self.exchange(me)
            return
        if me.count % self.period:
            yield Step(gradient)
            return
        if self.mode == "asynchronous":
            pull = yield self.pull(me)
            yield Step(gradient)
            me.parameters[:] = me.parameters - pull
            return
        stretch = displacement(me)
        yield Step(gradient)
        workers = yield Agree(1, How.SUM)
        yield from move(me, stretch, self.pull_centre, remainder=None)  # the spring stays stretched
        me.parameters[:] = me.parameters + (self.beta / workers) * stretch

    def due(self, me: Me) -> bool:
        """Whether an exchange follows this iteration; the first one sets the threshold."""
        memory, done = me.private, me.count + 1
        memory.loss = memory.loss if me.loss is None else me.loss
        memory.added += memory.loss or 0.0
        memory.told += memory.loss is not None
        if memory.threshold is None:
            if done == self.period:
                memory.threshold = self.calibrate(memory.added, memory.told)
            return done == self.period
        since: int = done - memory.last
        enough: bool = memory.added > memory.threshold > 0
        return since >= self.most or (since >= self.shortest and enough)

    def calibrate(self, added: float, told: int) -> float:
        """The loss of a period; a script that reports after its step has told one less by then."""
        if not told:
            raise ConfigError(
                f"EASGD with an adaptive period goes by the training loss, and in {self.period} iterations "
                "there was none. Call pace.report(loss=...) before optimizer.step(). A simulation of times "
                "has no losses: simulate it with its script, paceline simulate SCRIPT."
            )
        return added if told == self.period else added * self.period / told

    def exchange(self, me: Me) -> Steps:
        """Both ends of the spring give way."""
        pull = yield self.pull(me)
        me.parameters[:] = me.parameters - pull
        me.private.last, me.private.added = me.count + 1, 0.0

    def pull(self, me: Me) -> Exchange:
        """The spring, seen from one end."""
        rate = self.beta / max(1, len(me.members))
        return Exchange(me.parameters, Rule.ELASTIC, CENTRE, rate=rate)

    def settle(self, me: Me) -> Steps:
        if self.adaptive and me.private.last < me.count:
            yield from self.exchange(me)

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
