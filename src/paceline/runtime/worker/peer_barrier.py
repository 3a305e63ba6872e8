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

    def wait(self, clock: int, nap: Callable[[float], None]) -> m.BarrierPassed:
        """The worker's gradient is in the weights, and its clock is this: return when it may go on."""
        rule, board = self._rule, self._board
        while not rule.may_advance(clock, self._members(), board.clock):
            nap(rule.poll_s)
        return m.BarrierPassed(rule.tries, rule.asked)

    def _members(self) -> list[int]:
        """Who takes part: this worker does, though a copy of the board may not show yet that it is back."""
        present = self._board.present()
        return present if self._rule.rank in present else sorted([*present, self._rule.rank])
