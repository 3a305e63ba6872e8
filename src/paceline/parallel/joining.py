"""`paceline.join`: a place on a mesh, if the run has one; else that of any other run."""

from __future__ import annotations

from typing import Any

from paceline.errors import ConfigError
from paceline.fabric.gpu import choose_device
from paceline.parallel.pace import MeshPace
from paceline.parallel.registry import ALONG, SPLITS, axis_of, check_along, make_split
from paceline.parallel.stepped import prepare
from paceline.protocols import PEERS, Pacing, Peer
from paceline.runtime import join as joining
from paceline.runtime import seat
from paceline.runtime.worker.environment import place_on_host
from paceline.runtime.worker.malloc import keep_freed_memory
from paceline.runtime.worker.pace import Pace


def join(protocol: str | Pacing | Peer | None = None, *, correct: str | None = None, **settings: Any) -> Pace:
    """Take part in the run this process was started for; alone when nobody started it."""
    place = seat.mine()
    if place is not None and place.config.mesh is not None and place.channel is not None:
        keep_freed_memory()
        choose_device(place_on_host(place))
        name, given = _chosen(_named(protocol), settings, place.config.protocol, place.config.settings)
        pace = MeshPace(place.config, place.rank, place.channel, name, given, prepare, _object(name, given))
        return joining.joined_as(pace)
    if not isinstance(protocol, str) or protocol not in SPLITS:
        return joining.join(protocol, correct=correct, **settings)
    make_split(protocol, settings)
    if place is not None and place.channel is not None:
        workers = place.config.workers
        raise ConfigError(
            f"protocol {protocol!r} splits a model over a mesh. Start the run with --mesh "
            f"{axis_of(protocol)}={workers}."
        )
    return joining.join(correct=correct)


def _object(name: str | None, settings: dict[str, Any]) -> object | None:
    return make_split(name, settings) if name in SPLITS else None


def _named(protocol: str | Pacing | Peer | None) -> str | None:
    if not isinstance(protocol, str | None):
        raise ConfigError(
            f"on a mesh, join takes a protocol's name, got {protocol!r}. Use join('allreduce')."
        )
    return protocol


def split_axis(protocol: str | Pacing | Peer | None) -> str | None:
    """The axis along which a protocol splits the model, if it does."""
    return axis_of(protocol) if isinstance(protocol, str) and protocol in SPLITS else None


def _chosen(
    protocol: str | None, settings: dict[str, Any], flag: str | None, given: dict[str, Any]
) -> tuple[str | None, dict[str, Any]]:
    """The protocol that the command names, else the script's; settings of the command win."""
    name = flag or protocol
    merged = (settings if name == protocol else {}) | given
    if name in SPLITS:
        make_split(name, merged)
    elif name in PEERS:
        check_along(name, merged)
    elif name is not None:
        raise ConfigError(
            f"protocol {name!r} needs a store, and a mesh has none. Use one of: "
            f"{', '.join(sorted(SPLITS))}; or along the axis data: {', '.join(ALONG)}."
        )
    return name, merged
