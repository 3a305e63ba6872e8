"""Some of many cases: evenly spread, always the same, others for another test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from zlib import crc32

T = TypeVar("T")


def evenly(cases: Sequence[T], most: int, name: str) -> list[T]:
    """At most so many of them; where the first one lies depends on the name."""
    if len(cases) <= most:
        return list(cases)
    first = crc32(name.encode()) % len(cases)
    return [cases[(first + number * len(cases) // most) % len(cases)] for number in range(most)]
