"""Tasks for `run_ranks` that need nothing but a process group."""

from __future__ import annotations

import time
from typing import Any


def fails(rank: int, size: int, request: Any) -> None:
    """One rank raises, the others wait for it."""
    if rank == 1:
        _ = 1.0 / (rank - 1.0)
    time.sleep(100)
