"""Records a peer run in the form of any other run: an iteration counts as a push, its answer as a release.

There is no rule here. A worker continues when its first joint operation of an iteration is carried out, or if
its iteration has none; the clock table then records a release.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paceline.protocols.core.base import Fate, Flush, Verdict
from paceline.protocols.core.clocks import Clocks


@dataclass
class PeerBooks:
    """Releases the workers that the meeting has answered. A version is an iteration that all have
    completed."""

    lockstep: ClassVar[bool] = False

    answered: set[int] = field(init=False, default_factory=set)
    completed: int = field(init=False, default=0)

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        release = tuple(sorted(rank for rank in self.answered if clocks.is_waiting(rank)))
        self.answered.clear()
        risen = bool(clocks.active) and clocks.slowest > self.completed
        self.completed = max(self.completed, clocks.slowest)
        return Verdict(fate=Fate.HOLD, flush=Flush.MEAN if risen else None, release=release)
