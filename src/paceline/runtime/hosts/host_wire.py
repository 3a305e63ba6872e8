"""What the ends of one host's workers share: its session, and what it was sent last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from paceline.config import RunConfig
from paceline.fabric.session import Session
from paceline.runtime.messages.memories import MemoryStretch


class Lying(NamedTuple):
    """A vector that lies at a host: by its number, with whom, and where."""

    number: int
    lane: int
    stretches: list[MemoryStretch]


class WorkerPlace(Protocol):
    """A worker of the host: its rank in the run, and its lane of the session."""

    rank: int | None
    lane: int


class HostWire(Protocol):
    """A host as the ends of its workers see it."""

    name: str
    number: int
    reach: str
    config: RunConfig
    session: Session
    equipped: bool
    version: int | None
    answer: Lying
    newest: int

    @property
    def lines(self) -> Mapping[int, WorkerPlace]:
        """The ends of its workers, by lane."""
