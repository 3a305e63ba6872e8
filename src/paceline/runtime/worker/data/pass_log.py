"""Counts the passes over a prepared loader that a script begins, and those that it breaks off.

A worker's intake, a lone worker and a mesh's loader keep one each; what it tells goes into the run's books.
"""

from __future__ import annotations

from paceline.store.work.due import LoaderPasses


class PassLog:
    """The passes over one loader."""

    def __init__(self) -> None:
        self._begun = self._broken = self._after = self._batches = 0

    def begins(self) -> None:
        """A pass begins; one before it that has not come to its end was broken off."""
        self._break_off()
        self._begun += 1

    def arrived(self) -> None:
        """A batch was handed out."""
        self._batches += 1

    def ends(self) -> None:
        """The loader has come to its end."""
        self._batches = 0

    def _break_off(self) -> None:
        if self._batches:
            self._broken += 1
            self._after = self._after or self._batches
            self._batches = 0

    def told(self, length: int, unused: int = 0) -> LoaderPasses:
        """At the end of the script: a pass under way was broken off. `length`: what len(loader) is; `unused`:
        batches that no step used."""
        self._break_off()
        return LoaderPasses(self._begun, self._broken, self._after, length, unused)
