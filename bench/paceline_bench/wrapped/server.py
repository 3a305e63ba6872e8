"""A parameter server of one flat tensor, however it is reached: gradients in, weights out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

LOOK_S = 0.05


class FlatServer:
    """Takes one push after the other, and knows who has come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[int] = set()

    def apply(self, gradient: Tensor) -> Any:
        """One push: step, and give what the worker gets."""
        raise NotImplementedError

    def push(self, rank: int, gradient: Tensor) -> Any:
        """Apply and answer."""
        with self._lock:
            self._seen.add(rank)
            return self.apply(gradient)

    def greet(self, rank: int) -> int:
        """A worker is there; how many are."""
        with self._lock:
            self._seen.add(rank)
            return len(self._seen)


def present(greet: Callable[[], int], workers: int, within_s: float) -> int:
    """How many workers a server has heard of, once all had the time to come: a world of one that was to be
    four is found out here."""
    deadline = time.monotonic() + within_s
    while (seen := greet()) < workers and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return seen
