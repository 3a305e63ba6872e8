"""The fabrics that carry vectors between peers: one line each, by the name that `--fabric` takes.

A fabric is three classes: the place where peers meet (in the owner's process), a worker's link to it, and the
worker. To add one, write them and register them here.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.runtime.meeting.collective import CollectiveMeeting
from paceline.runtime.meeting.place import MeetingPlace


class Fabric(NamedTuple):
    """How vectors get from peer to peer."""

    meeting: type[MeetingPlace]


FABRICS: dict[str, Fabric] = {
    "shared": Fabric(MeetingPlace),
    "gloo": Fabric(CollectiveMeeting),
}
