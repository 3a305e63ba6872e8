"""Protocols as a user would write them: one of each family, and what somebody may get wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paceline.protocols import Clocks, Peer, Verdict
from paceline.protocols.core.operations import Average, Compute, Step, Steps
from paceline.protocols.core.peer import Me, average_model


@dataclass(frozen=True, slots=True)
class HalfWay:
    """Go on when near the slowest, or when more than half of all wait.

    Promise: at most half of the workers wait.

    Made up for the tests.
    """

    lockstep: ClassVar[bool] = False

    near: int = 2
    """Iterations a worker may always be ahead of the slowest."""

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if 2 * clocks.waiting_count > len(clocks.active):
            return Verdict(release=clocks.waiting())
        return Verdict(release=clocks.waiting(up_to=clocks.slowest + self.near))


@dataclass(frozen=True, slots=True)
class Belt(Peer):
    """Average gradients always, and models now and then."""

    every: int = 100
    """Iterations after which models are averaged too."""

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        mean = yield Average(gradient, weight=me.samples)
        yield Step(mean)
        if (me.count + 1) % self.every == 0:
            yield from average_model(me)


@dataclass
class Remembers:
    lockstep: ClassVar[bool] = False
    seen: dict[int, int] = field(init=False, default_factory=dict)

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=clocks.waiting())


@dataclass
class Unfrozen:
    lockstep: ClassVar[bool] = False
    near: int = 2

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=clocks.waiting())


@dataclass
class UnfrozenPeer(Peer):
    def iteration(self, me: Me) -> Steps:
        yield Compute()


@dataclass(frozen=True)
class NoLockstep:
    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=clocks.waiting())


@dataclass(frozen=True)
class NoIteration(Peer):
    every: int = 1


@dataclass(frozen=True)
class NotDerived:
    def iteration(self, me: Me) -> Steps:
        yield Compute()


class NoDataclass:
    lockstep: ClassVar[bool] = False

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=clocks.waiting())


class Thing:
    pass


@dataclass(frozen=True)
class OddSetting(HalfWay):
    thing: Thing | None = None


@dataclass(frozen=True)
class Nothing:
    near: int = 2


@dataclass(frozen=True)
class Demanding:
    lockstep: ClassVar[bool] = False
    near: int

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(release=clocks.waiting())
