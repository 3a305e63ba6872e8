"""Learning-rate schedulers among several workers: they follow the run, and are as long as it is.

A worker sees only its part of the batches, so `len(loader)` is smaller after `prepare` than before. A
schedule that was built from the length before would end half-way, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError

LENGTHS = {
    "OneCycleLR": "total_steps",
    "CosineAnnealingLR": "T_max",
    "CosineAnnealingWarmRestarts": "T_0",
    "PolynomialLR": "total_iters",
    "LinearLR": "total_iters",
    "ConstantLR": "total_iters",
    "StepLR": "step_size",
}
"""Schedules that are built from a number of steps, and by which argument."""


def lengths(scheduler: Any) -> Iterator[tuple[str, str, int]]:
    """Name, argument and number of steps, of a schedule or of its parts; those of a LambdaLR nobody knows."""
    kind = type(scheduler).__name__
    for each in dict.fromkeys(base.__name__ for base in type(scheduler).__mro__):
        if each in LENGTHS and isinstance(getattr(scheduler, LENGTHS[each], None), int):
            yield each, LENGTHS[each], getattr(scheduler, LENGTHS[each])
        if each == "CyclicLR":
            yield each, "step_size_up", round(scheduler.total_size * scheduler.step_ratio)
    for milestone in (*getattr(scheduler, "milestones", ()), *getattr(scheduler, "_milestones", ())):
        yield kind, "milestone", int(milestone)
    for part in getattr(scheduler, "_schedulers", ()):
        yield from lengths(part)


def misfit(
    scheduler: LRScheduler, before: int, now: int, workers: int, planned: int | None = None
) -> str | None:
    """What is wrong with a schedule for epochs of `before` steps in a run with `now` per epoch, of which it
    has `planned`."""
    if before == now:
        return None
    for kind, name, steps in lengths(scheduler):
        epochs, rest = divmod(steps, before)
        if epochs and not rest:
            return _built_before(
                f"{kind} was built with {name}={steps}", name, epochs, (before, now), workers
            )
        if planned and now * planned < steps <= before * planned:
            return (
                f"{kind} was built with {name}={steps}, which never comes: with {workers} workers the run "
                f"takes {now * planned} steps in {planned} epochs, and not {before * planned} as alone. "
                "Build it from len(loader) after prepare, and call pace.prepare(scheduler)"
            )
    return None


def _built_before(what: str, name: str, epochs: int, per_epoch: tuple[int, int], workers: int) -> str:
    before, now = per_epoch
    each = f"{epochs} epochs" if epochs > 1 else "1 epoch"
    return (
        f"{what}: {each} of the {before} batches that the loader has before prepare. With {workers} workers "
        f"the run takes {now} steps per epoch, so {each} would end at step {epochs * now} of "
        f"{epochs * before}. Prepare model, optimizer and loader first; then build it with "
        f"{name}={epochs} * len(loader), which is {epochs * now}, and call pace.prepare(scheduler)"
    )


def catch_up(scheduler: LRScheduler, steps: int) -> None:
    """Bring a resumed run's scheduler to where it stood."""
    if steps:
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
    for _ in range(steps):
        scheduler.step()


def steps_of(scheduler: LRScheduler) -> int:
    """How often it was stepped, as it says itself."""
    parts: Sequence[LRScheduler] = getattr(scheduler, "_schedulers", ())
    return int(scheduler.last_epoch) if hasattr(scheduler, "last_epoch") else steps_of(parts[0])


def _told_where(kind: str, epoch: float) -> ConfigError:
    return ConfigError(
        f"{kind}.step({epoch!r}): a scheduler that follows the run is not told where it stands. Call step() "
        "without an argument, or do not give it to pace.prepare: then it is this worker's own."
    )


SLACK = 0.05
"""Of a schedule's length: how many steps more a run may turn out to have, by rounding epochs up to rounds."""


def follow(
    scheduler: LRScheduler, missed: Callable[[], int], say: Callable[[str], None] | None = None
) -> None:
    """Let each step be as many as were missed. Where the schedule is over a little too soon its last rate
    stays, and `say` is told; without it that is torch's error.

    By a class of its own: an attribute would be in its `state_dict()`, and could not be pickled.
    """
    kind, total = type(scheduler), getattr(scheduler, "total_steps", None)
    allowed = 0 if total is None or say is None else 2 + int(SLACK * total)
    held = 0

    def step(self: LRScheduler, epoch: float | None = None) -> None:
        nonlocal held
        if epoch is not None:
            raise _told_where(kind.__name__, epoch)
        for _ in range(missed()):
            if total is None or say is None or self.last_epoch < total or held == allowed:
                kind.step(self)  # if it is over, torch says so
                continue
            held += 1
            if held == 1:
                say(
                    f"{kind.__name__} was made for {total} steps, and the run takes a few more: epochs are "
                    "rounded up to rounds of all workers. It stays at its last learning rate"
                )

    named = {"step": step, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    scheduler.__class__ = type(kind.__name__, (kind,), named)
