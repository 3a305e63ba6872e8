"""The owner's process: from its first worker to the last line of the trace."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.channel import Channel
from paceline.fabric.door import Enter
from paceline.fabric.tls import Trust
from paceline.fabric.wire import check_secret, parse_address, show_address
from paceline.runtime.fabrics import FABRICS
from paceline.runtime.hosts.death_notice import DeathNotice
from paceline.runtime.hosts.relay import Relay
from paceline.runtime.hosts.remote_hosts import RemoteHosts
from paceline.runtime.owner.loop import RealLoop
from paceline.runtime.owner.owner import Owner
from paceline.runtime.portions.orders import Coordinator
from paceline.runtime.portions.owner import PortionOwner
from paceline.runtime.portions.share import HostShare
from paceline.runtime.virtual.loop import VirtualLoop
from paceline.runtime.virtual.meeting import VirtualMeeting
from paceline.runtime.virtual.replay import ReplayLoop
from paceline.runtime.virtual.replay_meeting import ReplayMeeting
from paceline.runtime.worker.stacks import be_ready
from paceline.sim.request import ClusterRequest
from paceline.trace import read_trace
from paceline.trace.life import claim, write_result

EVERYWHERE = ("0.0.0.0", "::")


def serve(config: RunConfig, workers: list[tuple[Channel, int]], stop: int, secret: str = "") -> int:
    """Hold the store for these workers (channel and pid, by rank) until all are gone."""
    loop: RealLoop | VirtualLoop | ReplayLoop
    if config.replay is not None:
        loop = ReplayLoop(read_trace(Path(config.replay)), config.until, stop)
        owner = Owner(config, loop.clock, meeting=ReplayMeeting)
        loop.attach(owner, workers)
    elif config.cluster is None:
        owner = _owner(config, secret)
        try:
            guests = _guests(config, secret, owner)
        except ConfigError as error:
            owner.halt("config", str(error))
            guests = None
        loop = RealLoop(owner, workers, stop, guests)
    else:
        cluster = msgspec.convert(config.cluster, ClusterRequest, strict=False).cluster()
        loop = VirtualLoop(cluster, config.seed, stop)
        owner = Owner(config, loop.clock, loop, VirtualMeeting)
        loop.attach(owner, workers)
    return _see_through(owner, loop)


def _owner(config: RunConfig, secret: str) -> Owner:
    """Of a store that is here as a whole, or lies on several hosts."""
    if config.store_hosts == 1:
        return Owner(config, time.monotonic, meeting=FABRICS[config.fabric].meeting)
    coordinator = Coordinator(check_secret(secret), config.host_patience_s, config.tls)
    return PortionOwner(config, time.monotonic, coordinator)


def serve_strangers(
    config: RunConfig, secret: str, ready: Callable[[str], socket.socket], stop: int | None = None
) -> int:
    """Hold the store for workers that somebody else started; `ready` is told the address, and gives what
    neighbours come through."""
    if config.listen is not None and parse_address(config.listen)[0] in EVERYWHERE:
        raise ConfigError(
            f"--listen {config.listen} is no address that workers of other hosts could be sent to. Name the "
            "one of this machine that they reach."
        )
    owner = _owner(config, secret)
    guests = _guests(config, secret, owner)
    assert guests is not None, "a store for strangers listens"
    listener = ready(show_address(*guests.address))
    status = _see_through(owner, RealLoop(owner, [], stop, guests, listener))
    write_result(config.path)
    return status


def _see_through(owner: Owner, loop: RealLoop | VirtualLoop | ReplayLoop) -> int:
    claim(owner.config.path, os.getpid())
    be_ready(owner.config.path, "store")
    try:
        loop.run()
    except BaseException as error:  # a bug of ours, or a torch error: the workers must not wait for ever
        owner.halt("failed", f"the store failed, {type(error).__name__}: {error}")
        raise
    finally:
        owner.close()
    return 0


def host(
    address: tuple[str, int],
    secret: str,
    session: str,
    workers: list[tuple[Channel, int]],
    stop: int,
    trust: Trust | None = None,
    door: tuple[str, str] | None = None,
) -> int:
    """Stand between the workers of this host and a store elsewhere. 1 if the run was lost or stopped, of
    which the last line of the log tells. `door`: be ready to hold a portion of it, listening at the first
    address, where others are told to come to the second (see `Guest`)."""
    key = check_secret(secret)
    hello = Enter(session, socket.gethostname())
    with DeathNotice(address, key, hello, trust):
        sharing = None if door is None else HostShare(address, key, *door, sealed=trust is not None)
        known = hello if sharing is None else msgspec.structs.replace(hello, reach=sharing.reach)
        relay = Relay(address, key, known, workers, stop=stop, trust=trust, sharing=sharing)
        relay.run()
    if relay.badly:
        print(relay.badly, file=sys.stderr)
    return 1 if relay.badly else 0


def _guests(config: RunConfig, secret: str, owner: Owner) -> RemoteHosts | None:
    """The door for other hosts; where it is stands in the run's folder."""
    if config.listen is None:
        return None
    guests = RemoteHosts(config, check_secret(secret))
    if isinstance(owner, PortionOwner):
        guests.on_lost = owner.host_lost
        owner.while_waiting(guests.overdue)
    (config.path / "address").write_text(show_address(*guests.address) + "\n")
    return guests
