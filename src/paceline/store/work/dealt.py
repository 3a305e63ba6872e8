"""The work of a run of peers: batch after batch to rank after rank, round and round.

Peers that meet regularly do equally many iterations whoever is fast, so a shared pile would only make
chance decide who trains on what. Dealt in turn, epoch after epoch without a break, a worker's batches
are the same in every run, and a round of all workers works on what one process would take as one batch.
Where every step is one of all (`level`), each epoch begins with the first rank again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.store.work.budget import Budget, Source, in_turn


class Dealt(Budget):
    """Every worker has its own batches; those of a worker that is gone go to the others."""

    def __init__(self, source: Source, workers: int, level: bool = False) -> None:
        super().__init__(source, workers, "equal", level)

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, everybody with what it was dealt then."""
        super().load(state)
        self._deal_again()

    def _deal(self, epoch: int, start: int, stop: int) -> dict[int, Sequence[int]]:
        living = sorted(self._live)
        turn = 0 if self._level else epoch * self.source.batches
        return {rank: in_turn(start, stop, i - turn, len(living)) for i, rank in enumerate(living)}
