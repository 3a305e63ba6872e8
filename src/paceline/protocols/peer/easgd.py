"""Elastic averaging SGD: every replica is tied to a common centre by a spring.

Paper: Zhang, Choromanska, LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015.

Promise: no replica is forced onto another; the centre is pulled to the mean of all, and the centre is the
model.

When: workers should explore independently and stay tied to a common model.

Invariant: an exchange without gradients leaves the sum of all replicas and the centre as it was: what the
spring takes from one end it gives to the other. With beta=1 the centre becomes the mean exactly. The first
exchange is in the first iteration, as in the authors' code; both ends use the values from before the local
step. alpha is beta divided by the workers there are, so that it follows them. For EAMSGD give the optimizer
Nesterov momentum. In synchronous mode every worker keeps a copy of the centre, so there is no server. In
asynchronous mode each worker exchanges with the one centre after its period, without waiting. There an
exchange is atomic (the authors' server takes no lock, and may hand out half an update).

With `lock=false` it is not: a worker reads the centre, computes the new one and writes it back. Updates that
others wrote in between are lost, as in DeepSpark's server. Then the sum is conserved only while no two
exchanges overlap. All values still stay within their former range, because every write is a mean of two of
them. DeepSpark's server reads again right before it writes, so it loses updates while one vector is added to
another; here they are lost while a vector travels to a worker and back, which takes longer.

DeepSpark (Kim, Park, Jang, Yoon, 2016) is the asynchronous form with an adaptive period: a worker exchanges
after the step with which the training loss it has added up since its last exchange exceeds what it had added
up in its first `period` iterations. So the period grows to about period x first loss / loss, and a worker
whose loss rises talks more often. What is left at the end is exchanged then. Unlike DeepSpark's, the distance
of two exchanges is clamped (`shortest`, `longest`). The loss is what the script reported last. With
`recalibrate` the threshold is regularly set again from the loss of the next `period` iterations; the period
then follows the recent fall of the loss, not the fall since the start. Its alpha is given directly and may
decay. So may the factor by which its server's alpha differs. With such a factor s a gap shrinks to 1 - alpha
- alpha s of its size, and the sum is conserved only for s = 1. Both decay with the iterations of the worker
that exchanges (DeepSpark's server counts exchanges instead).

Its baseline is `mode=downpour` (Dean et al., NeurIPS 2012): every `period` iterations a worker adds its
displacement to the centre and continues from the centre. Nothing is lost: the centre is the start plus all
displacements, so n workers move it n times as far as one. Unlike in DeepSpark, where the server has the
optimizer and receives sums of gradients, here every worker has its own optimizer.
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
    """How far the centre moves to the mean of the replicas. Each replica moves beta/workers of the way to the
    centre."""

    mode: Literal["synchronous", "asynchronous", "downpour"] = "synchronous"
    """synchronous: all exchange at the same time. asynchronous: each worker exchanges after its own period.
    downpour: it adds its displacement to the centre and adopts the centre, without a spring."""
    adaptive: bool = False
    """Asynchronous only: exchange by accumulated training loss; `period` only calibrates the threshold
    (DeepSpark)."""
    shortest: int = 1
    """Adaptive only: fewest iterations between two exchanges."""
    longest: int = 0
    """Adaptive only: most iterations between two exchanges. 0: ten periods."""
    recalibrate: int = 0
    """Adaptive only: number of exchanges after which the threshold is calibrated again. 0: only at the
    start."""
    alpha: float | None = None
    """How far a replica moves to the centre in an exchange. null: beta/workers."""
    decay_rate: float = 1.0
    """Factor on alpha (or beta) at each decay."""
    decay_step: int = 0
    """Iterations between two decays of alpha. 0: no decay."""
    decay_limit: int = 0
    """How many times alpha decays at most. 0: no limit."""
    lock: bool = True
    """Asynchronous only: an exchange is atomic. false: the centre is read, then written, and updates of
    others in between are lost, as in DeepSpark; for comparison."""
    server_factor: float = 1.0
    """Asynchronous only: how many times as far the centre moves to the replica as the replica to the
    centre."""
    factor_decay_rate: float = 1.0
    """Factor on server_factor at each of its decays."""
    factor_decay_step: int = 0
    """Iterations between two decays of server_factor. 0: no decay."""
    factor_decay_limit: int = 0
    """How many times server_factor decays at most. 0: no limit."""

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
        if not self.lock and self.mode != "asynchronous":
            raise ConfigError(
                f"EASGD lock=false is for mode=asynchronous, got mode={self.mode}: only there do workers "
                "change the centre one by one. Leave it out."
            )
        if self.recalibrate < 0 or (self.recalibrate and not self.adaptive):
            raise ConfigError(
                f"EASGD recalibrate is a number of exchanges >= 0 with adaptive=true, got {self.recalibrate} "
                f"with adaptive={str(self.adaptive).lower()}."
            )
        if not 1 <= self.shortest <= self.most:
            raise ConfigError(
                f"EASGD needs 1 <= shortest <= longest iterations between exchanges, got {self.shortest} and "
                f"{self.most}."
            )
        if self.recalibrate and not self.shortest <= self.period <= self.most:
            raise ConfigError(
                f"EASGD recalibrate={self.recalibrate} exchanges after period={self.period} iterations each "
                f"time, which has to lie within shortest={self.shortest} and longest={self.most}."
            )
        self._check_rates()

    def _check_rates(self) -> None:
        """Refuse rates with which an exchange would overshoot."""
        alpha = self.beta if self.alpha is None else self.alpha
        if not 0 <= alpha <= 1 or not self.server_factor > 0 or not alpha * self.server_factor <= 1:
            raise ConfigError(
                "EASGD needs alpha and alpha x server_factor in [0, 1] and server_factor > 0, got "
                f"alpha={alpha:g}, server_factor={self.server_factor:g}: beyond that an exchange overshoots."
            )
        if self.server_factor != 1 and self.mode != "asynchronous":
            raise ConfigError(
                f"EASGD server_factor={self.server_factor:g} is for mode=asynchronous, got {self.mode}: "
                "only there is a centre that somebody else keeps. Leave it out."
            )
        if self.mode == "downpour" and (self.alpha is not None or self.decay_step):
            raise ConfigError("EASGD mode=downpour has no spring. Leave alpha and decay_step out.")
        check_decay("decay", self.decay_rate, self.decay_step, self.decay_limit)
        check_decay("factor_decay", self.factor_decay_rate, self.factor_decay_step, self.factor_decay_limit)

    @property
    def plain_alone(self) -> bool:
        return False

    @property
    def most(self) -> int:
        """Most iterations between two adaptive exchanges."""
        return self.longest or 10 * self.period

    def start(self, me: Me) -> None:
        begin(me)
        me.private.last, me.private.added, me.private.told = 0, 0.0, 0
        me.private.loss, me.private.threshold = None, None
        me.private.exchanges = 0
        if self.mode == "downpour":
            me.private.fetched = me.parameters.clone()

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        if self.mode == "downpour":
            yield Step(gradient)
            if (me.count + 1) % self.period == 0:
                yield from self.pour(me)
            return
        if self.adaptive:
            yield Step(gradient)
            if self.due(me):
                yield from self.exchange(me)
            return
        if me.count % self.period:
            yield Step(gradient)
            return
        if self.mode == "asynchronous":
            pull = yield from self.pull(me)
            yield Step(gradient)
            self.give_way(me, pull)
            return
        stretch = displacement(me)
        yield Step(gradient)
        workers = yield Agree(1, How.SUM)
        springs = self.springs(me, workers)

        def pull_centre(me: Me, mean: Vector) -> None:
            me.agreed.snapshot[:] = me.agreed.snapshot - springs * mean
            me.after_step(me.agreed.snapshot)

        yield from move(me, stretch, pull_centre, remainder=None)  # the spring stays stretched
        me.parameters[:] = me.parameters + (springs / workers) * stretch

    def due(self, me: Me) -> bool:
        """Whether an exchange follows this iteration. Sets the threshold if there is none."""
        memory, done = me.private, me.count + 1
        memory.loss = memory.loss if me.loss is None else me.loss
        memory.added += memory.loss or 0.0
        memory.told += memory.loss is not None
        since: int = done - memory.last
        if memory.threshold is None:
            if since == self.period:
                memory.threshold = self.calibrate(memory.added, memory.told)
            return since == self.period
        enough: bool = memory.added > memory.threshold > 0
        return since >= self.most or (since >= self.shortest and enough)

    def calibrate(self, added: float, told: int) -> float:
        """Set the threshold from the loss of one period. A script that reports after its step has reported
        one loss less by then."""
        if not told:
            raise ConfigError(
                f"EASGD with an adaptive period goes by the training loss, and in {self.period} iterations "
                "there was none. Call pace.report(loss=...) before optimizer.step(). A simulation of times "
                "has no losses: simulate it with its script, paceline simulate SCRIPT."
            )
        return added if told == self.period else added * self.period / told

    def exchange(self, me: Me) -> Steps:
        """One exchange: move both the centre and the replica."""
        pull = yield from self.pull(me)
        self.give_way(me, pull)
        memory = me.private
        memory.last, memory.added, memory.told = me.count + 1, 0.0, 0
        memory.exchanges += 1
        if self.recalibrate and memory.exchanges % self.recalibrate == 0:
            memory.threshold = None

    def pull(self, me: Me) -> Steps:
        """Move the centre. Returns how far it moved."""
        workers = max(1, len(me.members))
        rate = self.springs(me, workers) / workers * self.factor(me)
        if self.lock:
            return (yield Exchange(me.parameters, Rule.ELASTIC, CENTRE, rate=rate))
        centre = yield Exchange(me.parameters, Rule.READ, CENTRE)
        pull = (me.parameters - centre) * rate
        yield Exchange(centre + pull, Rule.WRITE, CENTRE)
        return pull

    def give_way(self, me: Me, pull: Vector) -> None:
        """Move the replica; the centre has moved `factor` times as far."""
        factor = self.factor(me)
        me.parameters[:] = me.parameters - (pull if factor == 1 else pull * (1 / factor))

    def pour(self, me: Me) -> Steps:
        """Downpour: add this worker's displacement to the centre, and continue from the centre."""
        moved = me.parameters - me.private.fetched
        me.parameters[:] = yield Exchange(moved, Rule.GOSSIP, CENTRE)
        me.private.fetched[:] = me.parameters
        me.private.last = me.count + 1

    def springs(self, me: Me, workers: int) -> float:
        """How far all springs together pull the centre to the mean of the replicas."""
        whole = self.beta if self.alpha is None else self.alpha * workers
        return whole * decayed(me.count, self.decay_rate, self.decay_step, self.decay_limit)

    def factor(self, me: Me) -> float:
        """How many times as far the centre moves as the replica."""
        rate, step, limit = self.factor_decay_rate, self.factor_decay_step, self.factor_decay_limit
        return self.server_factor * decayed(me.count, rate, step, limit)

    def settle(self, me: Me) -> Steps:
        if self.mode == "downpour" and me.private.last < me.count:
            yield from self.pour(me)
        elif self.adaptive and me.private.last < me.count:
            yield from self.exchange(me)

    def remarks(self, workers: int) -> list[str]:
        said = [] if self.lock else ["easgd: lock=false loses updates where exchanges overlap, on purpose"]
        springs = 0.0 if self.alpha is None else workers * self.alpha * self.server_factor
        if self.mode == "downpour" or springs <= 1:
            return said
        return [
            *said,
            f"easgd: {workers} workers x alpha {self.alpha:g} x server_factor {self.server_factor:g} is "
            f"{springs:g}: above 1 the centre overshoots the mean of the replicas when all exchange. "
            f"Use alpha <= {1 / (workers * self.server_factor):.3g}, or beta instead of alpha",
        ]

    @property
    def free(self) -> bool:
        return self.mode != "synchronous"

    @property
    def repeats(self) -> bool:
        return self.mode == "synchronous"

    @property
    def adds_moves(self) -> bool:
        return self.mode == "downpour"

    def cell(self, me: Me) -> int | None:
        return CENTRE if self.free else None

    def model(self, me: Me) -> Vector:
        centre: Vector = me.agreed.snapshot
        return centre


def check_decay(name: str, rate: float, step: int, limit: int) -> None:
    """Refuse decay settings that are impossible or would never begin."""
    if not 0 < rate <= 1 or step < 0 or limit < 0:
        raise ConfigError(
            f"EASGD needs {name}_rate in (0, 1], {name}_step and {name}_limit >= 0, got {rate:g}, {step} "
            f"and {limit}."
        )
    if rate < 1 and not step:
        raise ConfigError(f"EASGD {name}_rate={rate:g} needs {name}_step, the iterations between decays.")


def decayed(iterations: int, rate: float, step: int, limit: int) -> float:
    """Factor after this number of iterations: `rate` to the power of the decays so far, one every `step`, at
    most `limit`."""
    times = iterations // step if step else 0
    return float(rate ** (min(times, limit) if limit else times))
