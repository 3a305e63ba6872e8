"""The schedulers that a script has prepared, among several workers: where each of them stands.

One that is stepped after every step of this worker's stands where the run does, whoever did the work. Any
other is stepped once per call, as in plain PyTorch: once per epoch, or every so many steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.errors import ConfigError
from paceline.runtime.checkpoints.worker_state import Mark, standing, steps_to_take
from paceline.runtime.worker.optimizer.schedules import catch_up, follow


class Passes(Protocol):
    """What is known of the passes over the loader."""

    passes: int
    """How many have ended here, those that a resumed script repeats included."""

    @property
    def between(self) -> bool:
        """Whether the script is between two passes."""


@dataclass(slots=True)
class _Prepared:
    """One of them."""

    scheduler: LRScheduler
    origin: int
    """The run's position at which it is at its beginning."""
    own: int
    """This worker's steps when the script stepped it last."""
    taken: int = 0
    """How often it was stepped, not counting what was between two passes: a resumed script repeats that."""
    follows: bool = True
    """Whether the script steps it after every step, as far as is known."""
    unsure: bool = False
    """Whether it is to be brought to the run's position, unless the script turns out to step it per epoch."""
    guessed: int = 0
    """Steps that were taken for that."""


class PreparedSchedulers:
    """Of one worker."""

    def __init__(self, passes: Passes, say: Callable[[str], None]) -> None:
        self._passes, self._say = passes, say
        self.position = 0
        """Where they are to stand: the run's samples (or updates), whoever processed them."""
        self._began = 0
        """The same when the iteration under way began."""
        self._own = 0
        """Steps of this worker's."""
        self._late = False
        """Whether the last of them came after the end of its pass: some loops ask for a batch before."""
        self._all: list[_Prepared] = []
        self._tell: dict[int, Callable[[], None]] = {}
        self._kept: list[tuple[int, Mark]] | None = None
        """Where those stood that are not prepared yet, by the checkpoint that the run goes on from."""

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._all)

    def when_following(self, scheduler: LRScheduler, tell: Callable[[], None]) -> None:
        """Call this once, when it first follows the run."""
        self._tell[id(scheduler)] = tell

    def prepare(self, scheduler: LRScheduler) -> None:
        """Let it follow the run: from its beginning, unless that was before this worker came."""
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ConfigError("ReduceLROnPlateau is stepped with a metric; leave it out of prepare.")
        one = _Prepared(scheduler, self.position, self._own)
        if self._kept:
            self._restore(one, *self._kept.pop(0))
        elif self._kept is None and not self._own and self.position:
            self._guess(one)
        self._all.append(one)
        follow(scheduler, partial(self._called, one), self._say)

    def _restore(self, one: _Prepared, kept: int, mark: Mark) -> None:
        one.origin, one.own = mark.origin, self._own - mark.since
        one.taken = steps_to_take(kept, self.position - one.origin)
        catch_up(one.scheduler, one.taken)

    def _guess(self, one: _Prepared) -> None:
        """This worker comes into a run that is under way, and nobody knows how others step theirs."""
        if not self._passes.passes:
            one.origin, one.unsure = 0, True
            return
        self._say(
            f"a {type(one.scheduler).__name__} was prepared in the middle of a run by a worker that was not "
            "there before: it begins at 0 now, where others may be further"
        )

    def _called(self, one: _Prepared) -> int:
        """The script steps it: how many steps that is."""
        since, one.own = self._own - one.own, self._own
        too_early = not self._own and self._kept is None and not one.unsure  # before the first step of all
        between = self._passes.between and not (self._late and since == 1)
        one.follows, one.unsure = since <= 1 and not between, False
        return self._once(one, between) if too_early or not one.follows else self._to_position(one)

    def _once(self, one: _Prepared, between: bool) -> int:
        """As in plain PyTorch."""
        one.taken += not between
        if one.guessed:
            self._mention_guessed(one)
        one.origin = self.position - one.taken
        return 1

    def _mention_guessed(self, one: _Prepared) -> None:
        self._say(
            f"a worker came into a run under way, and took {one.guessed} steps of a "
            f"{type(one.scheduler).__name__} at once, as if the script stepped it every iteration. That it "
            "does not was seen only now: its rate stays another one. Leave the scheduler out of prepare"
        )
        one.guessed = 0

    def _to_position(self, one: _Prepared) -> int:
        one.guessed = 0
        self._tell.pop(id(one.scheduler), lambda: None)()
        steps = max(self.position - one.origin - one.taken, 0)
        one.taken += steps
        return steps

    def begin(self, another: bool = False) -> None:
        """An iteration's gradient is there; or it is `another` optimizer's step with the same data."""
        for one in self._all:
            if one.unsure:
                catch_up(one.scheduler, 1)  # which is as many as the run has taken
                one.guessed = one.taken
        self._began, self._late = self.position, self._passes.between
        self._own += not another

    def go_on(self, kept: Sequence[int], marks: Sequence[Mark]) -> None:
        """The run goes on where each stood."""
        told = [*marks, *[Mark()] * (len(kept) - len(marks))]
        self._kept = list(zip(kept, told, strict=True))

    def standing(self) -> tuple[tuple[int, ...], tuple[Mark, ...]]:
        """What a checkpoint keeps of them."""
        kept = [self._standing(one) for one in self._all]
        return tuple(steps for steps, _ in kept), tuple(mark for _, mark in kept)

    def _standing(self, one: _Prepared) -> tuple[int, Mark]:
        since, began = self._own - one.own, self._began - one.origin
        if one.follows and since <= 1:
            return standing(one.taken, began), Mark(one.origin)
        return one.taken, Mark(one.origin, since)
