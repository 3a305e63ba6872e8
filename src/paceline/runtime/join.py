"""`paceline.join`: find this process's place and take it."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError
from paceline.protocols import PEERS
from paceline.protocols.settings import make_any, make_peer
from paceline.runtime import seat
from paceline.runtime.peer.collective.link import CollectiveLink
from paceline.runtime.peer.collective.worker import CollectiveWorker
from paceline.runtime.peer.worker import PeerWorker
from paceline.runtime.worker.link import StoreLink
from paceline.runtime.worker.malloc import keep_freed_memory
from paceline.runtime.worker.pace import Pace
from paceline.runtime.worker.paced import PacedWorker
from paceline.runtime.worker.solo import RecordedSolo, Solo

_joined: Pace | None = None


def join(protocol: str | None = None, **settings: Any) -> Pace:
    """Take part in the run this process was started for; alone when nobody started it.

    The protocol and settings named here are the script's defaults: the command's flags win.
    """
    global _joined
    if _joined is not None:
        raise ConfigError("join was called twice in one process. Keep what the first call returned.")
    if protocol is not None:
        make_any(protocol, settings)
    elif settings:
        raise ConfigError(
            f"join got settings {sorted(settings)} without a protocol. Name one: join('ssp', ...)."
        )
    _joined = _take_part(protocol, settings)
    return _joined


def joined() -> Pace | None:
    """What `join` returned in this process, if it was called."""
    return _joined


def _take_part(protocol: str | None, settings: dict[str, Any]) -> Pace:
    place = seat.mine()
    if place is None:
        return Solo()
    if place.stand_in is not None:
        made: Pace = place.stand_in()
        return made
    if place.channel is None:
        return RecordedSolo(place.config, protocol, settings)
    keep_freed_memory()
    kind = CollectiveLink if place.config.connects else StoreLink
    link = kind(place.channel, protocol, settings, place.rank)
    name = link.config.protocol or protocol
    if name not in PEERS:
        return PacedWorker(link)
    peer = make_peer(name, (settings if name == protocol else {}) | link.config.settings)
    return CollectiveWorker(link, peer) if isinstance(link, CollectiveLink) else PeerWorker(link, peer)
