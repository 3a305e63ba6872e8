"""Vectors that a run keeps for its workers to exchange with, one exchange after another."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.protocols.core.operations import Rule
from paceline.store.parameters import CHUNK

Parts = Sequence[Tensor]


class Cells:
    """All begin as the initial parameters, and take memory when they are first used."""

    def __init__(self, initial: Parts) -> None:
        self._initial = [part.clone() for part in initial]
        self._cells: dict[int, list[Tensor]] = {}

    def __getitem__(self, cell: int) -> Parts:
        if cell not in self._cells:
            self._cells[cell] = [part.clone() for part in self._initial]
        return self._cells[cell]

    def exchange(
        self, rule: Rule, cell: int, other: int | None, rate: float, vector: Parts, into: Parts
    ) -> None:
        """Carry a rule out; the answer goes to `into`."""
        mine, theirs = self[cell], None if other is None else self[other]
        for index, part in enumerate(vector):
            for start in range(0, part.numel(), CHUNK):
                cut = slice(start, start + CHUNK)
                partner = None if theirs is None else theirs[index][cut]
                match rule:
                    case Rule.GOSSIP:
                        _gossip(mine[index][cut], partner, part[cut], into[index][cut])
                    case Rule.ELASTIC:
                        _stretch(mine[index][cut], part[cut], rate, into[index][cut])
                    case Rule.READ:
                        into[index][cut].copy_(mine[index][cut])
                    case Rule.WRITE:
                        mine[index][cut].copy_(part[cut])


def _gossip(mine: Tensor, theirs: Tensor | None, moved: Tensor, into: Tensor) -> None:
    if theirs is not None:
        mine.add_(theirs).mul_(0.5)
        theirs.copy_(mine)
    into.copy_(mine.add_(moved))


def _stretch(centre: Tensor, vector: Tensor, rate: float, into: Tensor) -> None:
    into.copy_(vector).sub_(centre).mul_(rate)
    centre.add_(into)
