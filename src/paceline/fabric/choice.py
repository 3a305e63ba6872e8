"""Which protocols can use which fabric, and which connections are encrypted."""

from __future__ import annotations

import ipaddress
import socket

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.wire import parse_address
from paceline.protocols import PEERS, Peer


def secured(config: RunConfig) -> RunConfig:
    """The same run, encrypted if it listens beyond this machine and nobody has asked for --plain."""
    if config.tls or not encrypts(config.listen, config.fabric, config.plain):
        return config
    return msgspec.structs.replace(config, tls=True)


def listening(config: RunConfig, address: str) -> RunConfig:
    """A run whose workers come from elsewhere, to this address. A mesh's stay on this machine, and find its
    conductor by name: there is nothing to listen at."""
    if config.mesh is not None:
        return config
    return secured(msgspec.structs.replace(config, listen=config.listen or address, here=0))


def encrypts(listen: str | None, fabric: str, plain: bool) -> bool:
    """Whether a run that listens there is encrypted by itself. What torch.distributed moves never is."""
    if listen is None or fabric != "shared" or plain:
        return False
    return not is_loopback(parse_address(listen)[0])


def is_loopback(host: str) -> bool:
    """Whether all addresses of that name are this machine's own, which nothing beyond it can reach."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(address).partition("%")[0]).is_loopback for address in found)


def check_hosts(fabric: str, elsewhere: bool) -> None:
    """Refuse a fabric between peers that does not lead to other hosts, if some are there."""
    if elsewhere and fabric != "shared":
        raise ConfigError(
            f"workers of other hosts take part, but {fabric!r} does not authenticate connections. Use "
            "--fabric shared: vectors then travel between hosts over the run's own authenticated "
            "connection."
        )


def check_store_hosts(hosts: int, name: str, protocol: object) -> None:
    """Refuse a store on several hosts for those who have none."""
    if hosts > 1 and isinstance(protocol, Peer):
        raise ConfigError(
            f"protocol {name!r} is of the peer family, which has no store to lie on several hosts. "
            "Leave --store-hosts out, or use a paced protocol (bsp has the steps of allreduce; ssp, ...)."
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
            f"protocol {name!r} with these settings exchanges one-sidedly through shared memory, which "
            f"fabric {fabric!r} does not have. Use --fabric shared."
        )
    if compress != "none":
        raise ConfigError(
            f"--compress {compress} works on shared memory and in simulation only, not yet over {fabric!r}. "
            "Leave one of the two out."
        )
