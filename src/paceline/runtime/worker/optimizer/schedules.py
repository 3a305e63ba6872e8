"""Learning-rate schedulers among several workers: they follow the run, and are as long as it is.

A worker sees only its part of the batches, so `len(loader)` is smaller after `prepare` than before. A
schedule that was built from the length before would end half-way, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.worker_state import standing, steps_to_take

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


def catch_up(scheduler: LRScheduler, steps: int) -> None:
    """Bring a resumed run's scheduler to where it stood."""
    if steps:
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
    for _ in range(steps):
        scheduler.step()


def steps_of(scheduler: LRScheduler) -> int:
    """How often it was stepped, as it says itself."""
    return int(getattr(scheduler, "last_epoch", 0))


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

    def step(self: LRScheduler, epoch: int | None = None) -> None:
        nonlocal held
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


class PreparedSchedulers:
    """The schedulers that a script steps once per iteration: each stands where the run says."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.position = 0
        """Where they are to stand: the run's samples (or updates), whoever processed them."""
        self._began = 0
        """The same when the iteration under way began."""
        self._steps: list[int] = []
        """How often each was stepped."""
        self._kept: list[int] | None = None
        """The same by the checkpoint that the run goes on from, of those not prepared yet."""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._steps)

    def prepare(self, scheduler: LRScheduler) -> None:
        """Let it follow the run."""
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau is stepped with a metric; leave it out of prepare.")
        done = steps_to_take(self._kept.pop(0) if self._kept else None, self.position)
        catch_up(scheduler, done)
        number = len(self._steps)
        self._steps.append(done)
        follow(scheduler, lambda: self._missed(number), self._say)

    def _missed(self, number: int) -> int:
        done = self._steps[number]
        self._steps[number] = max(self.position, done)
        return self._steps[number] - done

    def begin(self) -> None:
        """An iteration's gradient is there."""
        self._began = self.position

    def go_on(self, kept: tuple[int, ...]) -> None:
        """The run goes on where each stood."""
        self._kept = list(kept)

    def standing(self) -> tuple[int, ...]:
        """What a checkpoint keeps of them."""
        return tuple(standing(steps, self._began) for steps in self._steps)
