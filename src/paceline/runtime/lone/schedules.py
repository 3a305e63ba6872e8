"""The prepared schedulers of a lone worker: as in plain PyTorch; a resume brings them to where they stood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.optim.lr_scheduler import LRScheduler

from paceline.runtime.checkpoints.worker_state import steps_to_take
from paceline.runtime.worker.optimizer.schedules import catch_up, steps_of


@dataclass(slots=True)
class _Standing:
    """One of them."""

    scheduler: LRScheduler
    origin: int
    """The run's steps when it was prepared."""
    began: int
    """How often it had been stepped then."""
    entered: int
    """How often it had been stepped when the last pass over the loader began."""
    ended: int
    """The same when it ended."""
    between: int = 0
    """How often it was stepped between passes: a resumed script repeats that."""


class LoneSchedules:
    """All of them."""

    def __init__(self) -> None:
        self._all: list[_Standing] = []
        self._kept: list[tuple[int, int]] | None = None
        self._stood = self._ended = 0
        self._inside = False

    def go_on(self, kept: Sequence[int] | None, origins: Sequence[int], steps: int) -> None:
        """The run goes on after so many steps; where each stood then, unless the checkpoint does not tell."""
        self._stood = steps
        if kept is not None:
            self._kept = list(zip(kept, [*origins, *[0] * (len(kept) - len(origins))], strict=True))

    def prepare(self, scheduler: LRScheduler, steps: int) -> None:
        """From its beginning, unless the run that goes on had begun it."""
        began, origin = steps_of(scheduler), steps
        if self._kept:
            kept, origin = self._kept.pop(0)
            catch_up(scheduler, steps_to_take(kept, steps - origin))
        elif self._kept is None and steps == self._stood:  # an old checkpoint does not tell
            origin = 0
            catch_up(scheduler, steps)
        now = steps_of(scheduler)
        self._all.append(_Standing(scheduler, origin, began, now, now))

    @property
    def origins(self) -> tuple[int, ...]:
        """The run's steps when each was prepared."""
        return tuple(one.origin for one in self._all)

    def pass_begins(self, steps: int) -> None:
        """Over the loader. A loop that looks for the next batch before it steps has taken the last step of a
        pass after the end of that."""
        late = steps > self._ended
        for one in self._all:
            now = steps_of(one.scheduler)
            if not self._inside and not (late and one.ended > one.entered):
                one.between += now - one.ended
            one.entered = now
        self._inside = True

    def pass_ends(self, steps: int) -> None:
        """It has come to its end."""
        self._inside, self._ended = False, steps
        for one in self._all:
            one.ended = steps_of(one.scheduler)

    def standing(self, steps: int, due: bool) -> tuple[int, ...]:
        """How often each was stepped within passes. `due`: whether the script is stopped before it came to
        step those that it steps every time."""
        return tuple(self._standing(one, steps, due) for one in self._all)

    def _standing(self, one: _Standing, steps: int, due: bool) -> int:
        now = steps_of(one.scheduler) if self._inside else one.ended
        taken = now - one.began - one.between
        return taken + (due and taken == steps - one.origin - 1)
