"""Stations that do little, to try crews out. A module of its own, since other processes import it."""

from __future__ import annotations

import time


class Sleeper:
    """A station that claims any world and takes its time."""

    def __init__(self, world: int, seconds: float = 0.0) -> None:
        self.world = world
        self._seconds = seconds

    def prepare(self) -> None:
        pass

    def exchange(self) -> None:
        time.sleep(self._seconds)

    def close(self) -> None:
        pass


class Broken(Sleeper):
    """A station that raises."""

    def exchange(self) -> None:
        raise ValueError("out of order")
