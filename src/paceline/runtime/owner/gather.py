"""`pace.gather`: every worker gives some bytes, and gets those of all.

Who waits here takes no part meanwhile, so that no protocol holds the others back for it. When all that are
left have given theirs, each gets everything, by rank.
"""

from __future__ import annotations

from typing import Any, Protocol

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.evaluation import StoreEvaluation
from paceline.runtime.run.family import Family
from paceline.runtime.run.member import Member


class GatheringRun(Protocol):
    """What is to be known of a run here: an `Owner` has it."""

    config: RunConfig
    virtual: Any
    """What keeps virtual time; None in a real run."""
    family: Family

    @property
    def living(self) -> list[Member]: ...
    @property
    def ending(self) -> bool: ...
    @property
    def evaluating(self) -> StoreEvaluation: ...
    def send(self, member: Member, message: m.FromStore, fds: tuple[int, ...] = ()) -> None: ...


class Exchanging:
    """The owner's half."""

    def __init__(self, owner: GatheringRun) -> None:
        self._owner = owner
        self._given: dict[int, m.Give] = {}
        self._aside: set[int] = set()

    def give(self, member: Member, message: m.Give) -> None:
        """A worker has come."""
        owner = self._owner
        if owner.virtual is not None or owner.config.replay is not None:
            raise ConfigError(
                "pace.gather() in a simulation or a replay is not possible yet: the trace does not record "
                "what workers exchange there. Let the lead evaluate (pace.evaluate), or run it for real."
            )
        self._given[member.rank] = message
        if not owner.family.meets and member.rank not in self._aside:
            self._aside.add(member.rank)
            owner.evaluating.step_aside(member)

    @property
    def open(self) -> bool:
        """Whether somebody has given something and waits."""
        return bool(self._given)

    def look(self) -> None:
        """See whether all have come that are left, or somebody waits in vain."""
        living = self._owner.living
        if not self._given or self._owner.ending:
            return
        if all(member.rank in self._given for member in living):
            given, self._given = self._given, {}
            for member in living:
                self._answer(member, given)
        elif all(member.asks for member in living) and self._owner.family.meets:
            absent = [str(member.rank) for member in living if member.rank not in self._given]
            here = [str(rank) for rank in sorted(self._given)]
            raise ConfigError(
                f"ranks {', '.join(absent)} wait in optimizer.step() for ranks {', '.join(here)}, which wait "
                "for them in pace.gather(). Call it on all workers after equally many iterations."
            )

    def _answer(self, member: Member, given: dict[int, m.Give]) -> None:
        if not given[member.rank].more and member.rank in self._aside:
            self._aside.discard(member.rank)
            self._owner.evaluating.step_in(member)
        self._owner.send(member, m.Given({rank: each.data for rank, each in sorted(given.items())}))
