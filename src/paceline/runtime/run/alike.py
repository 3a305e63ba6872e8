"""With several optimizers: gradients that are averaged have to be for the same one."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import ConfigError
from paceline.protocols.core.meeting import Gathered
from paceline.runtime.run.member import Member
from paceline.store.replicas import GRADIENTS, Replica


def check_alike(gathered: Gathered, replicas: Mapping[int, Replica], members: Mapping[int, Member]) -> None:
    """Refuse a mean of gradients for different optimizers."""
    if gathered.kind == "average":
        row = gathered.rows[gathered.receivers[0]]
        places = {replicas[rank].brought(gathered.turn).place for rank in row}
        which = {rank: members[rank].which for rank in row}
        if places == {GRADIENTS} and len(set(which.values())) > 1:
            raise different_optimizers(which)


def different_optimizers(which: dict[int, int]) -> ConfigError:
    """Several optimizers, and workers that do not step them in the same order."""
    told = ", ".join(f"rank {rank} steps optimizer {number}" for rank, number in sorted(which.items()))
    return ConfigError(
        f"{told} in the same round. Where a round is one step, all workers step their optimizers in the same "
        "order: do not let it depend on the data, or use a protocol without rounds, such as asp."
    )
