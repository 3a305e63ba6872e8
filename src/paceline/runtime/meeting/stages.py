"""How many iterations workers have done, and what they were after those that not all have come to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.runtime.meeting.sums import far_peers
from paceline.runtime.run.member import Member
from paceline.store.replicas import PARAMETERS, Replica


class Stages:
    """One run's."""

    def __init__(self, replicas: Mapping[int, Replica], members: Mapping[int, Member]) -> None:
        self._replicas, self._members = replicas, members
        self._fetching = False
        """Whether replicas of other hosts are on their way, to be evaluated."""

    def __getitem__(self, rank: int) -> int:
        return self._replicas[rank].stage

    def lowest(self, ranks: Iterable[int]) -> int:
        """Iterations that all of these have completed."""
        return min((self[rank] for rank in ranks), default=0)

    def lies_still(self, member: Member, stage: int, mixes: bool) -> bool:
        """Whether that does what a worker was after so many iterations. If it has done fewer, whether it
        comes to no further one: it sleeps, and not in an operation that it `mixes` in."""
        if self[member.rank] >= stage:
            computes = not member.asks and self._replicas[member.rank].place_at(stage) == PARAMETERS
            return not computes
        return member.asks and not (mixes or member.draws or member.lingers is not None)

    def fetched(self, living: Iterable[Member], stage: int | None) -> bool:
        """Whether all replicas are here as they were then, or (None) as they are; those of other hosts are
        sent for, once."""
        ranks = [member.rank for member in living]
        for rank in () if self._fetching else ranks:
            for line in far_peers(self._members, [rank]):
                line.fetch(PARAMETERS if stage is None else self._replicas[rank].place_at(stage))
        self._fetching = any(line.fetching for line in far_peers(self._members, ranks))
        return not self._fetching
