"""The work of a run of peers: batch after batch to rank after rank, round and round.

Peers that meet regularly do equally many iterations whoever is fast, so a shared pile would only make
chance decide who trains on what. Dealt in turn, epoch after epoch without a break, a worker's batches
are the same in every run, and a round of all workers works on what one process would take as one batch.
Where every step is one of all (`level`), each epoch begins with the first rank again.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from paceline.store.work.budget import Budget, Source, deal_again


class Dealt(Budget):
    """Every worker has its own batches; those of a worker that is gone go to the others."""

    def __init__(self, source: Source, workers: int, level: bool = False) -> None:
        super().__init__(source, workers, "equal", level)
        self._turn = 0

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, everybody with what it was dealt then."""
        super().load(state)
        deal_again(self)

    def _deal(self) -> dict[int, deque[int]]:
        living = sorted(self._live)
        shares: dict[int, deque[int]] = {rank: deque() for rank in living}
        for index in range(self.source.batches):
            shares[living[(self._turn + index) % len(living)]].append(index)
        self._turn += 0 if self._level else self.source.batches
        return shares
