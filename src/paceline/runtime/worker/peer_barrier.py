"""A barrier that a worker keeps itself: it asks a few others how far they are, and nobody decides for it."""

from __future__ import annotations

from collections.abc import Callable

from paceline.fabric.board import Board
from paceline.protocols.paced.psp_distributed import PeerBarrier
from paceline.runtime.messages import workers as m


class WorkerBarrier:
    """One worker's barrier, with the others' clocks on a board."""

    def __init__(self, rule: PeerBarrier, board: Board) -> None:
        self._rule = rule
        self._board = board

    def wait(self, nap: Callable[[float], None]) -> m.BarrierPassed:
        """The worker's gradient is in the weights: count it, and return when it may go on."""
        rule, board = self._rule, self._board
        clock = board.tick(rule.rank)
        while not rule.may_advance(clock, board.present(), board.clock):
            nap(rule.poll_s)
        return m.BarrierPassed(rule.tries, rule.asked)
