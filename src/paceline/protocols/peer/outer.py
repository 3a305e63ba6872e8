"""What local SGD, FedAvg, DiLoCo and EASGD share: a snapshot all agree on, and how far each has come from it.

`me.agreed.snapshot` is the last model that was the same for all. A worker's *displacement* is the
snapshot minus its replica, old minus new, so that it points where a gradient does. Its mean over the
workers goes to an outer rule, which moves the snapshot; what becomes of the replica is the protocol's
affair.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import ConfigError
from paceline.protocols.core.operations import Average, Steps, Vector
from paceline.protocols.core.peer import Me, average_buffers

Rule = Callable[[Me, Vector], None]
"""Moves the snapshot, given the mean displacement."""


def begin(me: Me) -> None:
    """All start from the same model."""
    me.agreed.snapshot = me.keep(me.parameters)


def displacement(me: Me) -> Vector:
    """How far this worker has come since the snapshot."""
    snapshot: Vector = me.agreed.snapshot
    return snapshot - me.parameters


def move(me: Me, moved: Vector, rule: Rule, weight: float = 1.0, remainder: str | None = "change") -> Steps:
    """Give the mean displacement to the outer rule; every worker does so, and arrives at the same."""
    rule(me, (yield Average(moved, weight=weight, remainder=remainder)))
    yield from average_buffers(me, weight=weight)


def take_mean(me: Me, mean: Vector) -> None:
    """The outer rule of plain averaging: a step of SGD with rate 1."""
    me.agreed.snapshot[:] = me.agreed.snapshot - mean
    me.after_step(me.agreed.snapshot)


def adopt(me: Me) -> None:
    """Let the replica be the snapshot."""
    me.parameters[:] = me.agreed.snapshot


def check_period(name: str, period: int) -> None:
    """A period that comes round."""
    if period < 1:
        raise ConfigError(f"{name} period must be >= 1 iterations, got {period}. Use 1 for every iteration.")
