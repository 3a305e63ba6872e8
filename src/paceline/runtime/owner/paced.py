"""A run with a store in the middle: verdicts are carried out on it, and workers released."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from paceline.errors import RunError
from paceline.protocols import Decision
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.apply import VerdictApplier
from paceline.runtime.owner.endings import keep_if_due
from paceline.runtime.run.family import Concluded
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.start import Run


class PacedFamily:
    """One per paced run."""

    meets: ClassVar[bool] = False
    closed: ClassVar[str] = ""
    distance: dict[str, float] | None = None

    def __init__(self, owner: OwnerView, run: Callable[[], Run], evaluate: Callable[[Member], None]) -> None:
        """`run`: asked each time, since a store may be cut into portions after the beginning; `evaluate`:
        begins the evaluation of a worker."""
        self._owner, self._run, self._evaluate = owner, run, evaluate

    def carry_out(self, decision: Decision) -> float:
        """Gradient, flush, releases: in this order, so that a release contains what caused it."""
        owner, run, again_s = self._owner, self._run(), decision.ask_again_s
        owner.ask_at = None if again_s is None else owner.now() + again_s
        run.store.use_cores(run.idle_cores(owner.cores, len(decision.release)))
        scale = VerdictApplier(owner.config, run, owner.members).carry_out(decision)
        if not owner.ending:
            keep_if_due(owner.keeping, run, owner.members.values())
        for rank in sorted(decision.release):
            run.held.set_aside(rank)
            owner.release(owner.members[rank])
        return scale

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """Only peers meet."""
        raise RunError(f"rank {member.rank} came to meet others, but this run has a store in the middle.")

    def away(self, member: Member, message: m.Away) -> None:
        """On weights that stand still for it."""
        self._evaluate(member)

    def missing(self, rank: int) -> list[int] | None:
        """Nobody meets: the protocol knows who waits."""
        return None

    def look(self) -> None:
        """Nothing is waited for: every push is answered when it comes."""

    def leave(self, member: Member) -> None:
        """The books tell the protocol, which is asked again; nothing else holds on to it."""

    def stop(self, kind: str) -> float:
        """Everybody is told instead of released."""
        return 0.0

    def conclude(self, lead: Member) -> Concluded:
        """The store has the model already."""
        return Concluded(None, whole=True)
