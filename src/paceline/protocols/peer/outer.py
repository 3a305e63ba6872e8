"""Shared by local SGD, FedAvg, DiLoCo and EASGD: a common snapshot, and each worker's displacement from it.

`me.agreed.snapshot` is the last model that was the same for all. A worker's *displacement* is the snapshot
minus its replica, old minus new, so it points in the direction of a gradient. Its mean over the workers goes
to an outer rule, which moves the snapshot. The protocol decides what happens to the replica.
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
    """How far this worker has moved since the snapshot."""
    snapshot: Vector = me.agreed.snapshot
    return snapshot - me.parameters


def move(me: Me, moved: Vector, rule: Rule, weight: float = 1.0, remainder: str | None = "change") -> Steps:
    """Apply the outer rule to the mean displacement. Every worker does this and gets the same result."""
    rule(me, (yield Average(moved, weight=weight, remainder=remainder)))
    yield from average_buffers(me, weight=weight)


def take_mean(me: Me, mean: Vector) -> None:
    """The outer rule of plain averaging: a step of SGD with rate 1."""
    me.agreed.snapshot[:] = me.agreed.snapshot - mean
    me.after_step(me.agreed.snapshot)


def adopt(me: Me) -> None:
    """Set the replica to the snapshot."""
    me.parameters[:] = me.agreed.snapshot


def check_period(name: str, period: int) -> None:
    """Refuse a period below 1."""
    if period < 1:
        raise ConfigError(f"{name} period must be >= 1 iterations, got {period}. Use 1 for every iteration.")
