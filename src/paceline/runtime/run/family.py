"""What the owner asks of a run, whether it has a store in the middle (paced) or none (peers)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

from paceline.errors import RunError
from paceline.protocols import Decision
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member

TOO_EARLY = "a worker pushed or drew before it was ready. Call prepare before training."


class Concluded(NamedTuple):
    """What the end of a run leaves to be saved."""

    peers: int | None
    """How many workers have saved their own part; None where that is not needed, or not all have."""
    whole: bool
    """Whether all is there that it takes to go on."""


class Family(Protocol):
    """A paced run or a run of peers."""

    meets: ClassVar[bool]
    """Whether workers meet each other, without a store in the middle."""
    closed: ClassVar[str]
    """Why nobody can join any more; empty: it can."""
    distance: dict[str, float] | None
    """How far apart the replicas were at the last evaluation, under its name; None: there is one model."""

    def carry_out(self, decision: Decision) -> float:
        """Do what the protocol has decided; returns how much the step counted."""

    def push(self, member: Member, push: m.Push) -> None:
        """A worker announces a gradient."""

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """A worker has come to a joint operation."""

    def away(self, member: Member, message: m.Away) -> None:
        """A worker wants to evaluate."""

    def missing(self, rank: int) -> list[int] | None:
        """Who has not come to the meeting that this worker waits in; None: it waits in none."""

    def look(self) -> None:
        """See whether something that was waited for has come."""

    def leave(self, member: Member) -> None:
        """A worker is gone."""

    def stop(self, kind: str) -> float:
        """The run is to end in good order; answers how many seconds longer than usual that may take."""

    def conclude(self, lead: Member) -> Concluded:
        """The run is over: put its model where it is saved from."""


class NotBegun:
    """Before all have come: nothing to do, and nobody may train."""

    meets: ClassVar[bool] = False
    closed: ClassVar[str] = ""
    distance: dict[str, float] | None = None

    def carry_out(self, decision: Decision) -> float:
        """Nobody can have pushed."""
        raise RunError(TOO_EARLY)

    def push(self, member: Member, push: m.Push) -> None:
        """There is no store yet."""
        raise RunError(TOO_EARLY)

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """Nobody can have met."""
        raise RunError("a worker came to meet others before it was ready. Call prepare before training.")

    def away(self, member: Member, message: m.Away) -> None:
        """There is no model yet."""
        raise RunError("a worker evaluated before it was ready. Call prepare before training.")

    def missing(self, rank: int) -> list[int] | None:
        """Nobody meets."""
        return None

    def look(self) -> None:
        """Nothing is waited for."""

    def leave(self, member: Member) -> None:
        """Nobody waits for it."""

    def stop(self, kind: str) -> float:
        """Nobody has anything to finish."""
        return 0.0

    def conclude(self, lead: Member) -> Concluded:
        """Nothing was trained."""
        return Concluded(None, whole=True)
