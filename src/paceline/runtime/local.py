"""A worker of a host whose store is elsewhere, as its relay knows it."""

from __future__ import annotations

from functools import cached_property

from paceline.fabric.channel import Channel
from paceline.fabric.segment import Segment
from paceline.runtime.places import FIRST_LENT, INITIAL, OWN, SEGMENT, WEIGHTS, Places
from paceline.store.layout import Layout
from paceline.store.replicas import PARAMETERS


class Local:
    """A worker of this host."""

    def __init__(self, lane: int, channel: Channel, pid: int) -> None:
        self.lane = lane
        self.channel = channel
        self.pid = pid
        self.layout: Layout | None = None
        self.segment: Segment | None = None
        self.weights: Segment | None = None
        self.offered: Segment | None = None
        self.rank: int | None = None
        self.answers: Segment | None = None
        """A peer's own."""
        self.lent: list[Segment] = []
        self.model: int | None = PARAMETERS
        """The place of what stands for a peer; None: that is kept by the run."""
        self.gone = False
        self.dismissed = False
        """Whether the store has heard the last of it."""

    def memory(self, what: int) -> Segment | None:
        """One of its memories, by its number on the wire."""
        if what >= FIRST_LENT:
            return self.lent[what - FIRST_LENT] if what - FIRST_LENT < len(self.lent) else None
        known = {SEGMENT: self.segment, WEIGHTS: self.weights, OWN: self.answers, INITIAL: self.offered}
        return known.get(what)

    @cached_property
    def places(self) -> Places:
        """Where its vectors lie."""
        assert self.layout is not None, "a peer registers before it meets"
        return Places(self.layout)
