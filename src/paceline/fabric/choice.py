"""Which protocols can use which fabric."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.protocols import PEERS, Peer


def check_hosts(fabric: str, elsewhere: bool) -> None:
    """Refuse a fabric between peers that does not lead to other hosts, if some are there."""
    if elsewhere and fabric != "shared":
        raise ConfigError(
            f"workers of other hosts take part, and over {fabric!r} nobody proves who connects. Use --fabric "
            "shared: between hosts vectors then travel over the run's own connection, where everybody does."
        )


def check_store_hosts(hosts: int, name: str, protocol: object) -> None:
    """Refuse a store on several hosts for those who have none."""
    if hosts > 1 and isinstance(protocol, Peer):
        raise ConfigError(
            f"protocol {name!r} is of the peer family, which has no store to lie on several hosts. "
            "Leave --store-hosts out, or use a paced protocol (ssp, dssp, ...)."
        )


def check_fabric(fabric: str, name: str, protocol: object, compress: str = "none") -> None:
    """Refuse a fabric between peers for what cannot use it."""
    if fabric == "shared":
        return
    if not isinstance(protocol, Peer):
        raise ConfigError(
            f"fabric {fabric!r} moves vectors from worker to worker, but protocol {name!r} is of the paced "
            f"family, whose store lies in shared memory. Use --fabric shared, or one of: {', '.join(PEERS)}."
        )
    if protocol.free:
        raise ConfigError(
            f"protocol {name!r} as it is set exchanges one-sidedly, with copies that lie in shared memory; "
            f"fabric {fabric!r} has none. Use --fabric shared."
        )
    if compress != "none":
        raise ConfigError(
            f"--compress {compress} works on shared memory and in simulation only, not yet over {fabric!r}. "
            "Leave one of the two out."
        )
