"""`paceline.join`: find this process's place and take it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import inf
from typing import Any

from paceline.corrections import parse_correction
from paceline.errors import ConfigError
from paceline.fabric.gpu import choose_device
from paceline.protocols import Pacing, Peer, own
from paceline.protocols.settings import is_peer, make_any, make_peer, resolved, spelled_out
from paceline.runtime import seat
from paceline.runtime.fabrics import FABRICS
from paceline.runtime.lone.recorded import RecordedSolo
from paceline.runtime.lone.solo import Solo
from paceline.runtime.peer.worker import PeerWorker
from paceline.runtime.worker.environment import place_on_host
from paceline.runtime.worker.increments import IncrementWorker
from paceline.runtime.worker.malloc import keep_freed_memory
from paceline.runtime.worker.pace import Pace
from paceline.runtime.worker.paced import PacedWorker

_joined: Pace | None = None


def join(
    protocol: str | Pacing | Peer | None = None,
    *,
    correct: str | None = None,
    trigger: float | None = None,
    **settings: Any,
) -> Pace:
    """Take part in the run this process was started for; alone when nobody started it.

    The protocol and settings named here are the script's defaults: the command's flags win. `correct` is
    what is done about stale gradients, as `--correct` takes it; `trigger` from which share of the usual norm
    on gradients are pushed, as `--trigger` takes it.
    """
    global _joined
    _check_free()
    if not isinstance(protocol, str | None):
        protocol, settings = _of_object(protocol, settings)
    if correct is not None:
        parse_correction(correct)
    if trigger is not None and not 0 < trigger < inf:
        raise ConfigError(f"trigger must be > 0, got {trigger:g}.")
    if protocol is not None:
        protocol = own.canonical(protocol)
        make_any(protocol, settings)
    elif settings:
        raise ConfigError(
            f"join got settings {sorted(settings)} without a protocol. Name one: join('ssp', ...)."
        )
    pace = _take_part(protocol, settings, correct, trigger)
    if _joined is not None:  # alone, as in a cell of a notebook that is run again
        _joined.depart()
    _joined = pace
    return pace


def _check_free() -> None:
    """Refuse a second place in a run. Who is alone begins anew, and leaves no run behind."""
    if _joined is None or seat.mine() is None:
        return
    if _joined.left:
        raise ConfigError(
            "paceline.join() was called again after pace.leave(): a worker that has left a run cannot join "
            "it again. Train before pace.leave(), or start another run."
        )
    raise ConfigError(
        "join was called twice in one process, and a worker has one place in its run. Keep what the first "
        "call returned, and pass it on."
    )


def joined_as(pace: Pace) -> Pace:
    """Note what `join` gives to this process, where another package made it."""
    global _joined
    _check_free()
    _joined = pace
    return pace


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """What a script joins here, of which only the model is wanted, is not this process's own place."""
    global _joined
    before, _joined = _joined, None
    try:
        yield
    finally:
        _joined = before


def joined() -> Pace | None:
    """What `join` returned in this process, if it was called."""
    return _joined


def _of_object(protocol: Pacing | Peer, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name, its = spelled_out(protocol)
    if settings:
        raise ConfigError(
            f"join got both a protocol object and settings {sorted(settings)}. Give the settings to the "
            "object."
        )
    built = make_any(name, its)
    if resolved(built) != resolved(protocol):
        raise ConfigError(
            f"protocol {name!r} built anew from its settings {its} has others, {resolved(built)}. Let its "
            "fields be plain numbers, words and lists that stay as they were given."
        )
    return name, its


def _take_part(
    protocol: str | None, settings: dict[str, Any], correct: str | None, trigger: float | None
) -> Pace:
    place = seat.mine()
    if place is None:
        return Solo()
    choose_device(place_on_host(place))
    if place.stand_in is not None:
        made: Pace = place.stand_in()
        return made
    if place.channel is None:
        return RecordedSolo(place.config, protocol, settings)
    keep_freed_memory()
    fabric = FABRICS[place.config.fabric]
    link = fabric.link(place.channel, protocol, settings, place.rank, correct, trigger)
    name = link.config.protocol or protocol
    peers = name is not None and is_peer(name)
    if name is not None:
        own.check_same_file(name, link.config.protocol_sha256, "where the run was started")
    if name is None or not peers:
        return PacedWorker(link) if link.config.apply == "optimizer" else IncrementWorker(link)
    peer = make_peer(name, (settings if name == protocol else {}) | link.config.settings)
    return PeerWorker(link, peer, fabric.carrier(link))
