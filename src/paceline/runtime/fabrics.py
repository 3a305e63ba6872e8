"""The fabrics that carry vectors between peers: one line each, by the name that `--fabric` takes.

A fabric is three classes: the place where peers meet (in the owner's process), a worker's link to it, and
what carries its vectors. To add one, write them and register them here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.runtime.meeting.collective import CollectiveMeeting
from paceline.runtime.meeting.place import MeetingPlace
from paceline.runtime.peer.carrier import Carrier
from paceline.runtime.peer.collective.carrier import CollectiveCarrier
from paceline.runtime.peer.collective.link import CollectiveLink
from paceline.runtime.peer.shared import SharedCarrier
from paceline.runtime.worker.link import StoreLink

L = TypeVar("L", bound=StoreLink)


@dataclass(frozen=True)
class Fabric(Generic[L]):
    """How vectors get from peer to peer."""

    meeting: type[MeetingPlace]
    link: type[L]
    carrier: Callable[[L], Carrier]


FABRICS: dict[str, Fabric[Any]] = {
    "shared": Fabric(MeetingPlace, StoreLink, SharedCarrier),
    "gloo": Fabric(CollectiveMeeting, CollectiveLink, CollectiveCarrier),
}
