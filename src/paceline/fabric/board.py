"""A board of clocks: workers of one host ask each other how far they are without a word.

One cell of eight bytes for each rank, in anonymous shared memory. A worker writes to its own cell only, and
an aligned cell is written whole: whoever is killed at whatever instant leaves a clock that was true, and no
lock. What is gone is said by whoever notices: the owner writes to a cell while its worker sleeps, to let it
take part, and when it is gone.
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
    def of(cls, fd: int, ranks: int) -> Board:
        """One that another process has made; the descriptor is closed."""
        segment = Segment(fd, ranks * CELL_BYTES)
        segment.close_fd()
        return cls(segment)

    @property
    def fd(self) -> int:
        """To be handed to another process."""
        return self._segment.fd

    def note(self, rank: int, clock: int | None) -> None:
        """A rank takes part from now on, at that clock; None: it no longer does."""
        self._cells[rank] = GONE if clock is None else clock

    def tick(self, rank: int) -> int:
        """The rank has completed an iteration; its new clock."""
        self._cells[rank] += 1
        return self._cells[rank]

    def present(self) -> list[int]:
        """Who takes part."""
        return [rank for rank, clock in enumerate(self._cells) if clock != GONE]

    def clock(self, rank: int) -> int:
        """How far a rank is."""
        return self._cells[rank]
