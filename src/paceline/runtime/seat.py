"""Where this process sits in a run. An engine takes the seat before the script begins; `join` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import RunConfig
from paceline.fabric.channel import Channel


@dataclass
class Seat:
    """A worker's place."""

    rank: int
    config: RunConfig
    channel: Channel | None
    """The way to the store; None for a lone worker, which needs none."""
    partition: int | None = None
    """An open file with the rows that its engine has for this worker alone."""
    local: tuple[int, int] | None = None
    """Its place among the workers of its host, and how many they are; None: all are on one."""
    stand_in: Callable[[], Any] | None = None
    """Makes the script's handle where it is no ordinary worker: one that is profiled, or that runs a plan."""


_seat: Seat | None = None


def take(seat: Seat | None) -> None:
    """Called by an engine, once, before the script runs."""
    global _seat
    _seat = seat


def mine() -> Seat | None:
    """The seat of this process; None when no engine started it."""
    return _seat
