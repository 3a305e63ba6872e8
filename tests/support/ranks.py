"""Tasks for `run_ranks` that need nothing but a process group."""

from __future__ import annotations

import atexit
import os
import signal
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


def loses_one(rank: int, size: int, request: Any) -> None:
    """The last rank is killed while the others exchange tensors with it."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def waits(rank: int, size: int, request: Any) -> None:
    """For longer than anybody has patience."""
    time.sleep(100)
