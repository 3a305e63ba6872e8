"""DiLoCo: long local training, then one outer step of Nesterov SGD along the mean displacement.

Paper: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023;
the details as in OpenDiLoCo (Jaghouar et al., 2024).

Promise: after every outer step all replicas are equal, with one exchange per `period` iterations.

Invariant: snapshot and outer momentum are the same on all workers after every outer step; every worker
makes that step by itself. The outer rule is that of torch.optim.SGD(nesterov=True): momentum begins as
the first displacement. With lr=1 and momentum=0 this is local SGD. Inner optimizers keep their state.
Displacements count alike, as in OpenDiLoCo, unless `weights` says by samples (the paper's weighting of
unequal shards).
One worker alone is *not* plain training: the outer step still acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Compute, Step, Steps, Vector
from paceline.protocols.core.peer import Me, Peer
from paceline.protocols.peer.outer import adopt, begin, check_period, displacement, move


@dataclass(frozen=True, slots=True)
class DiLoCo(Peer):
    period: int = 500
    """Inner iterations between two outer steps."""
    lr: float = 0.7
    """Learning rate of the outer step; 1 takes the whole mean displacement."""
    momentum: float = 0.9
    """Nesterov momentum of the outer step."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Whether every worker's displacement counts the same, or by its samples since the last outer step."""

    def __post_init__(self) -> None:
        check_period("DiLoCo", self.period)
        if not 0 < self.lr < float("inf") or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"DiLoCo needs a finite lr > 0 and momentum in [0, 1), got lr={self.lr:g}, "
                f"momentum={self.momentum:g}."
            )

    @property
    def plain_alone(self) -> bool:
        return False

    def start(self, me: Me) -> None:
        begin(me)
        me.agreed.momentum = None
        me.private.samples = 0

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        yield Step(gradient)
        me.private.samples += me.samples
        if (me.count + 1) % self.period == 0:
            weight = me.private.samples if self.weights == "samples" else 1.0
            me.private.samples = 0
            yield from move(me, displacement(me), self.outer_step, weight=weight)
            adopt(me)

    def outer_step(self, me: Me, mean: Vector) -> None:
        """Nesterov's rule on the mean displacement."""
        agreed = me.agreed
        if agreed.momentum is None:
            agreed.momentum = mean.clone()
        else:
            agreed.momentum[:] = self.momentum * agreed.momentum + mean
        agreed.snapshot[:] = agreed.snapshot - self.lr * (mean + self.momentum * agreed.momentum)
