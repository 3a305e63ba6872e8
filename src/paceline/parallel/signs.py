"""Signs on a board of shared memory: at which iteration all workers of a mesh stop, save, or end.

A worker of a mesh cannot just be told to stop: the others would wait for it for ever. All have to do so
before the same iteration, and none may have begun it. Every worker writes down which iteration it is about to
begin, then looks whether a halt is called. The conductor calls one, then reads how far all are: whoever has
not seen the call is read at the iteration it is in, and whoever has seen it waits for the number. So the
iteration after the largest one has been begun by nobody, and all hear of it in time.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum

from paceline.fabric.board import Board

LOOK_S = 0.0005


class Action(IntEnum):
    """What to do before the iteration that was named."""

    NONE = 0
    SAVE = 1
    STOP = 2
    END = 3


class Signs:
    """The board: one cell for each rank, then what is called for, and at which iteration."""

    def __init__(self, board: Board, ranks: int) -> None:
        self._board, self._ranks = board, ranks

    @classmethod
    def create(cls, ranks: int) -> Signs:
        """A new one, on which nobody has begun."""
        board = Board.create(ranks + 2)
        for cell in range(ranks + 2):
            board.note(cell, 0)
        return cls(board, ranks)

    @classmethod
    def of(cls, fd: int, ranks: int) -> Signs:
        """One that the conductor has made."""
        return cls(Board.of(fd, ranks + 2), ranks)

    @property
    def fd(self) -> int:
        """To be handed to a worker."""
        return self._board.fd

    def begin(self, rank: int, iteration: int) -> Action:
        """A worker is about to begin an iteration, counted from 1; what it has to do instead."""
        self._board.note(rank, iteration)
        os.sched_yield()  # the note is seen before the look: no processor keeps it back this long
        action = Action(self._board.clock(self._ranks))
        if action is Action.NONE:
            return action
        while not (at := self._board.clock(self._ranks + 1)):
            time.sleep(LOOK_S)
        return action if iteration >= at else Action.NONE

    def call(self, action: Action) -> int:
        """Call for something; the iteration before which all do it."""
        self._board.note(self._ranks + 1, 0)
        self._board.note(self._ranks, action)
        time.sleep(LOOK_S)
        at = max(self._board.clock(rank) for rank in range(self._ranks)) + 1
        self._board.note(self._ranks + 1, at)
        return at

    def clear(self) -> None:
        """All have done it, and wait."""
        self._board.note(self._ranks, 0)
        self._board.note(self._ranks + 1, 0)

    @property
    def called(self) -> Action:
        """What is called for now."""
        return Action(self._board.clock(self._ranks))
