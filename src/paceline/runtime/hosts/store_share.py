"""What a host's relay asks of its share in a store that lies on several hosts: an interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from paceline.fabric.segment import Segment
from paceline.fabric.session import Session
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.portions import PortionPlan


class StoreShare(Protocol):
    """Knows who holds which portion, and may hold one."""

    held: bool
    """Whether a portion was ever here."""
    holds: bool
    """Whether it is needed still."""

    def planned(
        self,
        plan: PortionPlan,
        weights: Callable[[int], Segment],
        gave_up: Callable[[str], None],
        ended: Callable[[], None],
    ) -> None:
        """The plan came, for the first time or again; `ended`: told when nothing is held any more."""

    def push(self, session: Session, lane: int, segment: Segment, push: m.Push) -> None:
        """Send a worker's gradient to all holders."""

    def tell(self, lane: int, tell: Callable[[], None]) -> None:
        """Pass a release on, when all portions of the weights are there."""

    def close(self) -> None:
        """Hang up everywhere."""
