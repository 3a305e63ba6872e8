"""Splits the time a peer sleeps into waiting for others and exchanging vectors. Real runs and simulations use
it.

A trace tells of each iteration how long it was computed, and when its first word was answered. A peer may
sleep more often than that within one iteration, and its vectors travel after everybody has come. This
counts the rest, for real runs and simulations alike, so that every second of a worker is on record once:
compute + wait + exchange is the time it took part (in a real run but for its own steps and messages).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Nap:
    """One sleep."""

    since: float
    pushes: bool
    """Whether its worker came with a push: then what it waits until it is released is on record."""
    booked: float = 0.0
    spent: float = 0.0


class Asleep:
    """Of all workers of a run."""

    def __init__(self) -> None:
        self._naps: dict[int, _Nap] = {}
        self._rest: dict[int, tuple[float, float]] = {}

    def came(self, rank: int, now: float, *, pushes: bool) -> None:
        """A worker sleeps from now on; `pushes`: its iteration goes on record with that."""
        self._naps[rank] = _Nap(now, pushes)

    def released(self, rank: int, now: float) -> None:
        """What it has waited with its push is on record."""
        nap = self._naps.get(rank)
        if nap is not None and nap.pushes:
            nap.booked, nap.pushes = now - nap.since, False

    def travels(self, rank: int, seconds: float) -> None:
        """Of its sleep, so much is spent on carrying out what it came for."""
        nap = self._naps.get(rank)
        if nap is not None:
            nap.spent += seconds

    def woke(self, rank: int, now: float) -> None:
        """It sleeps no longer; one that is lost while its push is not answered waits on record."""
        nap = self._naps.pop(rank, None)
        if nap is not None:
            whole = now - nap.since - (now - nap.since if nap.pushes else nap.booked)
            spent = min(nap.spent, whole)
            waited, travelled = self._rest.get(rank, (0.0, 0.0))
            self._rest[rank] = waited + whole - spent, travelled + spent

    def take(self, rank: int) -> tuple[float, float]:
        """Seconds waited and spent on exchanges since this was asked last, other than on record already."""
        return self._rest.pop(rank, (0.0, 0.0))
