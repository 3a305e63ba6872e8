"""Whose replicas stand for the run: those the mean of all models is taken of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from paceline.runtime.run.member import Member
from paceline.runtime.run.peer_start import PeerRun
from paceline.store.replicas import Replica

LATE_ROUNDS = 2
"""How many rounds the others may have gone on without a finished worker for its replica to count."""


class ReplicaMembership:
    """Knows how far every worker has come, and when it left."""

    def __init__(self, run: PeerRun, members: dict[int, Member]) -> None:
        self._run, self._members = run, members
        self._left_at: dict[int, int] = {}
        self.iterations: Counter[int] = Counter()

    @property
    def most(self) -> int:
        """How many iterations the one has done that has done most."""
        return max(self.iterations.values(), default=0)

    def behind(self, ranks: Iterable[int]) -> int:
        """How many iterations fewer the one of them has done that has done fewest."""
        return self.most - min((self.iterations[rank] for rank in ranks), default=self.most)

    def left(self, rank: int) -> None:
        """A worker has no more to do, or is gone."""
        self._left_at[rank] = self._run.ledger.pacer.clocks.pushes

    def stayed(self) -> dict[int, Replica]:
        """Whose models count: not the dead's, nor those of workers that left long before the others.

        Long before is not early alone: who has done as many iterations as the others was merely faster.
        """
        pushes, most = self._run.ledger.pacer.clocks.pushes, self.most
        late = LATE_ROUNDS * len(self._members)
        there = [r for r, each in self._members.items() if not each.lost] or list(self._members)
        stayed = [rank for rank in there if pushes - self._left_at.get(rank, pushes) < late]
        level = [rank for rank in there if most - self.iterations[rank] < LATE_ROUNDS]
        return {rank: self._run.replicas[rank] for rank in sorted({*stayed, *level})}

    def counted(self, stayed: dict[int, Replica]) -> list[int]:
        """Of whose models, among these, the mean is taken."""
        if not self._run.protocol.agrees:
            return sorted(stayed)
        # all are equal but for those who left before the last step
        return [max(stayed, key=lambda rank: (stayed[rank].stage, self.iterations[rank], -rank))]
