"""Whether the length that a learning-rate schedule was built for is the one that the run will have.

A worker sees only its part of the batches, so `len(loader)` is smaller after `prepare` than before. A
schedule that was built from the length before would end half-way, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

TOTALS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "PolynomialLR": "total_iters",
    "LinearLR": "total_iters",
}
"""Schedules that know how long they are, and by which argument."""


def totals(scheduler: Any) -> Iterator[tuple[str, str, int]]:
    """Name, argument and length of a schedule, or of its parts; that of a LambdaLR nobody knows."""
    kinds = [kind.__name__ for kind in type(scheduler).__mro__]
    for kind in kinds:
        if kind in TOTALS and isinstance(getattr(scheduler, TOTALS[kind], None), int):
            yield kind, TOTALS[kind], getattr(scheduler, TOTALS[kind])
    for part in getattr(scheduler, "_schedulers", ()):
        yield from totals(part)


def misfit(scheduler: LRScheduler, before: int, now: int, workers: int) -> str | None:
    """What to write instead of a schedule for epochs of `before` steps in a run with `now` per epoch."""
    for kind, name, total in totals(scheduler):
        epochs, rest = divmod(total, before)
        if epochs and not rest and before != now:
            each = f"{epochs} epochs" if epochs > 1 else "1 epoch"
            return (
                f"{kind} was built with {name}={total}: {each} of the {before} batches that the loader has "
                f"before prepare. With {workers} workers the run takes {now} steps per epoch, so {each} "
                f"would end at step {epochs * now} of {total}. Prepare model, optimizer and loader first; "
                f"then build it with {name}={epochs} * len(loader), which is {epochs * now}, and call "
                "pace.prepare(scheduler)"
            )
    return None
