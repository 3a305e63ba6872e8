"""The environment that scripts written for torchrun look at: who am I, among how many, on this host too.

MASTER_ADDR and MASTER_PORT are not set. Workers are tied together by `pace.prepare`; a script that calls
`torch.distributed.init_process_group` besides would average gradients twice, so it is told at once.
"""

from __future__ import annotations

import os

from paceline.runtime.seat import Seat

TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What libraries look at to see whether they are one of several workers."""


def tell_environment(seat: Seat) -> None:
    """Set what torchrun sets, for a worker that was started by something else."""
    place, size = seat.local or (seat.rank, seat.config.workers)
    told = {
        "RANK": seat.rank,
        "WORLD_SIZE": seat.config.workers,
        "LOCAL_RANK": place,
        "LOCAL_WORLD_SIZE": size,
    }
    os.environ.update({name: str(number) for name, number in told.items()})


def place_on_host(seat: Seat) -> int:
    """Which of its host's workers this one is, from 0; torchrun knows as well."""
    told = os.environ.get("LOCAL_RANK", "")
    return int(told) if told.isdecimal() else (seat.local or (seat.rank, 0))[0]


def hide_environment() -> None:
    """Take away what tells that there are several workers: what other starters set, too."""
    for name in TOLD:
        os.environ.pop(name, None)


def hint_for(message: str) -> str:
    """What else to say about a script's own error, if it comes from what is not set."""
    if "MASTER_ADDR" in message or "MASTER_PORT" in message:
        return (
            ". Paceline ties workers together itself: leave out init_process_group and "
            "DistributedDataParallel, and give pace.prepare the plain model. If a library does that because "
            "it finds RANK and WORLD_SIZE (accelerate, transformers), call paceline.join(environment=False) "
            "before it is set up"
        )
    return ""
