"""What a worker's lookups cost: ids it was asked for, seconds of its own, seconds of waiting for others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from paceline.trace.events import Lookups


class LookupMeter:
    """One per worker; cheap enough to be always on."""

    def __init__(self) -> None:
        self._none()

    def _none(self) -> None:
        self._count = self._ids = 0
        self._lookup_s = self._latency_s = self._longest_s = 0.0

    def looked_up(self, ids: int, seconds: float) -> None:
        """Rows were read for the group."""
        self._ids += ids
        self._lookup_s += seconds

    @contextmanager
    def lookup(self) -> Iterator[None]:
        """Around a whole lookup."""
        began = perf_counter()
        yield
        took = perf_counter() - began
        self._count += 1
        self._latency_s += took
        self._longest_s = max(self._longest_s, took)

    def take(self) -> Lookups | None:
        """What there is; None: nothing."""
        if not self._count:
            return None
        made = Lookups(self._count, self._ids, self._lookup_s, self._latency_s, self._longest_s)
        self._none()
        return made
