"""Workers that `--park` leaves out of a run: started or named, but never given work."""

from __future__ import annotations

from collections.abc import Collection

from paceline.errors import ConfigError


def check_parked(park: Collection[int], workers: int, shards: str) -> None:
    """Refuse to park a rank that does not exist, that leads, or whose share no other worker would take."""
    for rank in park:
        if not 0 < rank < workers:
            why = "leads the run: it prints and evaluates" if rank == 0 else "does not exist"
            raise ConfigError(
                f"rank {rank} cannot be parked because it {why}. Park some of ranks 1 to {workers - 1}."
            )
    if park and shards != "shared":
        raise ConfigError(
            f"--park gives workers no data, but --shards {shards} gives every worker a share. Use "
            "--shards shared."
        )
