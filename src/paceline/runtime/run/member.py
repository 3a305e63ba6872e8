"""A worker as the owner of the store knows it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping

from paceline.config import RunConfig
from paceline.errors import BadGradient
from paceline.fabric.channel import Channel, WorkerLine
from paceline.fabric.presence import counted_from
from paceline.fabric.segment import Segment
from paceline.runtime.messages.workers import FromWorker, Meet, Push, Register
from paceline.runtime.run.held_gradients import HeldGradient
from paceline.store.layout import Layout
from paceline.store.optimizers import GroupSettings
from paceline.store.parameters import Gradients

PUSHES = (Push, Meet)
"""What comes after a gradient was computed."""


class Member:
    """Keyed by connection, not by rank: a rank that returns is a new member."""

    def __init__(self, rank: int, channel: WorkerLine, pid: int) -> None:
        self.rank = rank
        self.channel = channel
        self.pid = pid
        self.asks = False
        """Whether it has said something that was not answered yet, and so is asleep."""
        self.registered: Register | None = None
        self.segment: Segment | None = None
        self.weights: Segment | None = None
        """Its own copy of the weights; None when all read one buffer."""
        self.gradients: Gradients | None = None
        self.settings: list[GroupSettings] = []
        self.rates: tuple[float, ...] = ()
        """The learning rates it steps with, where all have to step with the same."""
        self.samples = 0
        """Samples behind the gradient in its segment."""
        self.finite = False
        """Whether it found that gradient finite."""
        self.scaled = False
        """Whether a GradScaler looks after its steps."""
        self.which = 0
        """Which of several optimizers that gradient is for."""
        self.again = 0
        """How many of its pushes were of further optimizers, with data that were counted already."""
        self.clip: float | None = None
        """The largest norm its script allows for the step with that gradient."""
        self.spent = False
        """Whether its script clears that gradient before it computes another."""
        self.overflowed = False
        """Whether the step with that gradient was skipped, and it has not been told yet."""
        self.draws = False
        """Whether it waits for a batch."""
        self.wants = True
        """Whether to grant it a batch with its next release."""
        self.snapshot = (0.0, 0, 0)
        """When its evaluation began, of which version, after how many samples."""
        self.evaluates = False
        """Whether it is away to evaluate, and so has the store's own weights."""
        self.looping = True
        """Whether it is inside of an epoch, and so will draw again."""
        self.lingers: int | None = None
        """The epoch at whose end it waits to hear that no work is left."""
        self.seen_epoch = -1
        """The last epoch at whose end it was."""
        self.gone = False
        self.lost = False
        """Whether it died or failed."""
        self.failed = False
        """Whether its script raised."""
        self.said: FromWorker | None = None
        """Its last word."""
        self.since_s = time.monotonic()
        """When it last spoke or was answered."""
        self.first_s: float | None = None
        """How long its first iteration took, which may be longer than all others."""
        self.longest_s = 0.0
        self.spells: deque[float] = deque(maxlen=32)
        """How long it was silent before its last pushes; `longest_s` before any word but the first push."""

    def speaks(self, message: FromWorker) -> None:
        """It is about to be heard: note how long it was silent, unless it was asleep."""
        now = time.monotonic()
        spell, pushes = max(0.0, now - counted_from(self.since_s)), isinstance(message, PUSHES)
        if not self.asks and self.first_s is not None:
            self.longest_s = max(self.longest_s, spell)
            if pushes:
                self.spells.append(spell)
        elif not self.asks and pushes:
            self.first_s = spell
        self.said, self.since_s = message, now

    def told(self, push: Push) -> None:
        """What it says about the gradient that lies in its segment."""
        self.samples, self.finite = push.samples if push.weigh is None else push.weigh, push.finite
        self.scaled, self.clip, self.which = push.scaled, push.clip, push.which
        self.spent = push.spent
        self.again += push.again
        self.rates = push.rates

    @property
    def near(self) -> Channel:
        """The channel of a worker on this machine."""
        assert isinstance(self.channel, Channel), "a worker elsewhere is heard through its host"
        return self.channel

    @property
    def far(self) -> bool:
        """Whether it is on another host."""
        return not isinstance(self.channel, Channel)

    @property
    def pushed(self) -> Gradients:
        """The gradients it announced."""
        assert self.gradients is not None, "a worker pushes only after it was equipped"
        return self.gradients


def smallest(one: float | None, other: float | None) -> float | None:
    """Of the norms that are asked for; None if none is."""
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def stops(config: RunConfig, members: Mapping[int, Member], ranks: Iterable[int]) -> bool:
    """Whether a sum of theirs that is not finite ends the run; a GradScaler has it skipped instead."""
    return config.bad_gradient == "stop" and not any(members[rank].scaled for rank in ranks)


def bad_gradient(suspects: list[HeldGradient], layout: Layout) -> BadGradient:
    """Name rank and parameter. The first suspect's memory may hold the others' sum: look there last."""
    for suspect in [*suspects[1:], suspects[0]]:
        name = suspect.gradients.bad_parameter(layout)
        if name is not None:
            return BadGradient(
                f"rank {suspect.rank} pushed a gradient with NaN or infinity in {name!r}; nothing was "
                "applied. Lower the learning rate, clip (--clip-norm), or use --bad-gradient skip."
            )
    return BadGradient(
        "the sum of the workers' gradients overflows; nothing was applied. Scale the loss down."
    )
