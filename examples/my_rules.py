"""Two protocols of one's own, one of each family: see docs/how-to-write-a-protocol.md.

paceline train examples/digits.py --protocol examples/my_rules.py:HalfWay --set near=3 --workers 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.protocols import Clocks, Peer, Verdict
from paceline.protocols.core.operations import Average, Compute, Step, Steps
from paceline.protocols.core.peer import Me, average_model


@dataclass(frozen=True, slots=True)
class HalfWay:
    """Go on when near the slowest, or when more than half of all wait.

    Promise: at most half of the workers wait.
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
    """Average gradients always, and models now and then.

    Promise: all models are equal after every iteration.
    """

    every: int = 100
    """Iterations after which models are averaged too."""

    def iteration(self, me: Me) -> Steps:
        gradient = yield Compute()
        mean = yield Average(gradient, weight=me.samples)
        yield Step(mean)
        if (me.count + 1) % self.every == 0:
            yield from average_model(me)
