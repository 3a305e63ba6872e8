"""Gradients that are averaged have to be for the same optimizer, and for steps of one rate where replicas are
to stay equal."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose

from paceline.errors import ConfigError
from paceline.protocols.core.meeting import Gathered
from paceline.runtime.run.member import Member
from paceline.store.replicas import GRADIENTS, Replica

SAME = 1e-6
"""Machines of different kinds may compute a schedule with another last bit."""


def check_alike(gathered: Gathered, replicas: Mapping[int, Replica], members: Mapping[int, Member]) -> None:
    """Refuse a mean of gradients for different optimizers, or for different rates."""
    if gathered.kind == "average":
        row = gathered.rows[gathered.receivers[0]]
        places = {replicas[rank].brought(gathered.turn).place for rank in row}
        which = {rank: members[rank].which for rank in row}
        if places == {GRADIENTS} and len(set(which.values())) > 1:
            raise different_optimizers(which)
        if places == {GRADIENTS}:
            _check_rates({rank: members[rank].rates for rank in sorted(row)})


def _check_rates(told: dict[int, tuple[float, ...]]) -> None:
    """Replicas that step with the same mean stay equal if all step at the same rates."""
    (lead, expected), *others = told.items()
    for rank, found in others:
        for one, other in zip(expected, found, strict=False):
            if not isclose(one, other, rel_tol=SAME):
                raise ConfigError(
                    f"rank {lead} steps with a learning rate of {one:g}, rank {rank} with {other:g} in the "
                    "same round: their replicas would drift apart. Step schedulers on all workers alike; a "
                    "figure of pace.evaluate() is rank 0's alone, so share it with pace.gather() before."
                )


def different_optimizers(which: dict[int, int]) -> ConfigError:
    """Several optimizers, and workers that do not step them in the same order."""
    told = ", ".join(f"rank {rank} steps optimizer {number}" for rank, number in sorted(which.items()))
    return ConfigError(
        f"{told} in the same round. Where a round is one step, all workers step their optimizers in the same "
        "order: do not let it depend on the data, or use a protocol without rounds, such as asp."
    )
