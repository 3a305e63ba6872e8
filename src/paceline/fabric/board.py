"""A board of clocks: workers of one host see how far all are without a word.

One cell of eight bytes for each rank, in anonymous shared memory. An aligned cell is written whole: whoever
is killed at whatever instant leaves a clock that was true, and no lock. Used by barriers that workers keep
themselves, where the owner writes and every host has a copy, and by the signs of a mesh.
"""

from __future__ import annotations

from paceline.fabric.segment import Segment

GONE = 1 << 62
"""The clock of who takes no part: ahead of all, so that nobody ever waits for it."""
CELL_BYTES = 8


class Board:
    """The clocks of all ranks."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._cells = memoryview(segment.map).cast("q")

    @classmethod
    def create(cls, ranks: int) -> Board:
        """A new one, on which nobody takes part yet."""
        board = cls(Segment.create(ranks * CELL_BYTES, "clocks"))
        for rank in range(ranks):
            board.note(rank, None)
        return board

    @classmethod
    def of(cls, fd: int, ranks: int, *, writable: bool = True) -> Board:
        """One that another process has made; the descriptor is closed."""
        segment = Segment(fd, ranks * CELL_BYTES, writable=writable)
        segment.close_fd()
        return cls(segment)

    @property
    def fd(self) -> int:
        """To be handed to another process."""
        return self._segment.fd

    def note(self, rank: int, clock: int | None) -> None:
        """A rank takes part from now on, at that clock; None: it no longer does."""
        self._cells[rank] = GONE if clock is None else clock

    def present(self) -> list[int]:
        """Who takes part."""
        return [rank for rank, clock in enumerate(self._cells) if clock != GONE]

    @property
    def clocks(self) -> dict[int, int]:
        """How far everybody is who takes part."""
        return {rank: clock for rank, clock in enumerate(self._cells) if clock != GONE}

    def clock(self, rank: int) -> int:
        """How far a rank is."""
        return self._cells[rank]
