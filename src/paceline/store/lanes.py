"""Threads for arithmetic on large memory: each takes a stretch of it and works through it alone.

Not OpenMP, which makes its threads meet after every operation: where a core is shared with a
worker that computes, all of them then wait for the one that lost its core, many times per update.
Here they meet once. What is computed does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

MOST = 8
"""Memory gives no more to further threads."""


class Lanes:
    """As many threads as there are free cores; none but the caller's own while there is one."""

    def __init__(self) -> None:
        self._width = 0
        self._pool: ThreadPoolExecutor | None = None

    def open(self, cores: int) -> None:
        """Use that many cores from now on."""
        width = max(1, min(cores, MOST))
        if width == self._width:
            return
        self._width = width
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        if self._width > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(MOST - 1, "paceline-lane", torch.set_num_threads, (1,))

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """What `work` makes of every item, in order. Neighbours go to the same thread."""
        width = min(self._width, len(items))
        if width <= 1 or self._pool is None:
            return [work(item) for item in items]
        bounds = [len(items) * lane // width for lane in range(width + 1)]
        shares = [items[start:stop] for start, stop in pairwise(bounds)]
        others = [self._pool.submit(_each, work, share) for share in shares[1:]]
        done = _each(work, shares[0])
        for other in others:
            done += other.result()
        return done


def _each(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    return [work(item) for item in items]
