"""Workers that are left out of a run: started, or named, but never given work."""

from __future__ import annotations

from collections.abc import Collection

from paceline.errors import ConfigError


def check_parked(park: Collection[int], workers: int, shards: str) -> None:
    """Refuse to park who is not there, who leads, or whose share nobody else would take."""
    for rank in park:
        if not 0 < rank < workers:
            why = "leads the run: it prints and evaluates" if rank == 0 else "does not exist"
            raise ConfigError(
                f"rank {rank} cannot be parked, it {why}. Park some of ranks 1 to {workers - 1}."
            )
    if park and shards != "shared":
        raise ConfigError(
            f"parked workers do nothing, but shards {shards!r} gives everybody a share. Use shards 'shared'."
        )
