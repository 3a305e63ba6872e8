"""Notices a script that trains without the loader it was given back by `prepare`.

That loader is a copy which takes batches from the run. The one that went in, or one that is made later, gives
every worker all of the data, and nobody counts it.
"""

from __future__ import annotations

from collections.abc import Callable

FEW = 20
"""Without any batch so far, this many steps are enough to say so."""


class Unused:
    """One worker's look at its steps and batches."""

    def __init__(self, length: int | None, say: Callable[[str], None]) -> None:
        """`length`: the loader's batches per epoch, if that is known."""
        self._length, self._say = length or FEW, say
        self._batches = self._steps = 0
        self._usual = 1
        """The most steps that were made with one batch, while batches came."""

    def arrived(self) -> None:
        """A batch has come from the loader."""
        if self._batches:
            self._usual = max(self._usual, self._steps)
        self._batches, self._steps = self._batches + 1, 0

    def stepped(self) -> None:
        """An optimizer has stepped. Several steps with one batch are nothing unusual, if batches come."""
        self._steps += 1
        many = max(self._length, FEW) * self._usual if self._batches else min(self._length, FEW)
        if self._steps == many and self._batches != 1:  # one batch does not show what is usual
            self._tell()

    def ends(self) -> None:
        """There are no further steps."""
        if self._steps and not self._batches:
            self._tell()

    def _tell(self) -> None:
        self._say(
            "the script makes steps without batches from the loader that prepare gave back. With any other "
            "loader every worker trains on all of the data, samples are not counted, and prepared schedulers "
            "do not follow. Use that loader in every epoch: "
            "`model, optimizer, loader = pace.prepare(model, optimizer, loader)`"
        )
