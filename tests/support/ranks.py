"""Tasks for `run_ranks` that need nothing but a process group."""

from __future__ import annotations

import atexit
import os
import time
from typing import Any


def fails(rank: int, size: int, request: Any) -> None:
    """One rank raises, the others wait for it."""
    if rank == 1:
        _ = 1.0 / (rank - 1.0)
    time.sleep(100)


class Aborting:
    """Ends the process badly when the interpreter takes itself apart."""

    def __del__(self) -> None:
        os.abort()


KEPT: list[Aborting] = []


def aborts_at_its_end(rank: int, size: int, request: Any) -> int:
    """A task that is done before its process fails."""
    KEPT.append(Aborting())
    atexit.register(print, "the script's own word at the end")
    return rank
