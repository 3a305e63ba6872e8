"""A worker of a host whose store is elsewhere, as its relay knows it."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cached_property
from pathlib import Path

import msgspec

from paceline.fabric.channel import Channel
from paceline.fabric.segment import Segment
from paceline.runtime.messages.memories import (
    FIRST_LENT,
    INITIAL,
    OWN,
    SEGMENT,
    STAGED,
    WEIGHTS,
    Places,
    lent_at,
)
from paceline.runtime.messages.workers import Meet, Welcome
from paceline.store.layout import Layout
from paceline.store.replicas import PARAMETERS


class LocalWorker:
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
        self.compress = "none"
        """How vectors are compressed in the run."""
        self.staged: Segment | None = None
        """Compressed vectors that its host was sent."""
        self.packed: dict[int, bytearray] = {}
        """Those that it has brought itself, by lane, until they are of no use to anybody."""
        self.waits = 0
        """The lane of what it has started and sleeps for."""
        self.gone = False
        self.dismissed = False
        """Whether the store has heard the last of it."""

    def end(self) -> None:
        """It is stuck, and the run goes on without it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def memory(self, what: int) -> Segment | None:
        """One of its memories, by its number on the wire."""
        if what >= FIRST_LENT:
            return self.lent[what - FIRST_LENT] if what - FIRST_LENT < len(self.lent) else None
        known = {SEGMENT: self.segment, WEIGHTS: self.weights, OWN: self.answers, INITIAL: self.offered}
        return self.staged if what == STAGED else known.get(what)

    def welcomed(self, welcome: Welcome, folder: Path) -> Welcome:
        """The run as a worker here sees it: what it keeps is in a folder of ours."""
        self.rank, self.compress = welcome.rank, welcome.config.compress
        resume = None if welcome.config.resume is None else str(folder / "resume")
        config = msgspec.structs.replace(welcome.config, folder=str(folder), resume=resume)
        return msgspec.structs.replace(welcome, config=config)

    def pack(self, message: Meet) -> bytearray:
        """What it has brought, compressed: a copy, kept until it was answered."""
        assert message.call is not None
        lent = self.memory(lent_at(message.place))
        assert lent is not None, "a compressed vector lies in memory that is lent"
        packed = self.packed[message.call.lane] = bytearray(memoryview(lent.map)[: message.packed])
        return packed

    def asked(self, message: Meet) -> None:
        """It sleeps, for something it has started or for something else."""
        self.waits = 0 if message.test else message.wait

    def answered(self) -> None:
        """Then nobody needs what it had brought."""
        if self.waits:
            self.packed.pop(self.waits, None)

    @cached_property
    def places(self) -> Places:
        """Where its vectors lie."""
        assert self.layout is not None, "a peer registers before it meets"
        return Places(self.layout)
