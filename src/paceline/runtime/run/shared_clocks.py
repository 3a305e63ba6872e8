"""The clocks of a run whose workers keep barriers of their own: a board here, and a copy on every other host.

The owner writes, workers read the board of their host. What changes here is sent to every host that has
workers, in order: so a copy shows what was true a moment ago. Clocks only rise, and who joins begins at the
clock of the slowest; so an old copy makes its workers wait longer, and never lets one pass against the rule.
"""

from __future__ import annotations

from paceline.fabric.board import Board
from paceline.fabric.channel import WorkerLine
from paceline.runtime.messages.hosts import ClocksNoted


class SharedClocks:
    """How far all are, for all to see."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.board = Board.create(ranks)
        """That of this host."""
        self._hosts: dict[int, WorkerLine] = {}
        """The way to each other host that has a copy: that to one of its workers."""

    def note(self, rank: int, clock: int | None) -> None:
        """A rank is that far; None: it no longer takes part."""
        self.board.note(rank, clock)
        for line in self._hosts.values():
            line.send(ClocksNoted(self._ranks, {rank: clock}))

    def share(self, line: WorkerLine) -> None:
        """A worker is about to begin: from now on its host has a copy."""
        number = line.host_number
        if number is not None and number not in self._hosts:
            self._hosts[number] = line
            line.send(ClocksNoted(self._ranks, dict(self.board.clocks)))
