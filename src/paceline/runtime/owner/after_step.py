"""The owner's half of `pace.after_step`: a worker that sleeps runs the script's function on stepped weights.

The function exists in the script's processes only. So after a step, and before anybody reads what came of it,
the owner puts the weights into a sleeping worker's memory, has it run the function there, and takes over the
result. Whatever else is said meanwhile waits. If that worker is lost another one is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member


class AskingRun(Protocol):
    """What is to be known of a run here: an `Owner` has it."""

    halted: m.Halt | None
    attend: Callable[[Member], None]

    @property
    def living(self) -> list[Member]: ...
    def send(self, member: Member, message: m.FromStore, fds: tuple[int, ...] = ()) -> None: ...
    def show_weights(self, memory: Segment) -> None: ...
    def take_weights(self, memory: Segment) -> None: ...


class AfterSteps:
    """One run's."""

    def __init__(self, owner: AskingRun) -> None:
        self._owner = owner
        self._asked: Member | None = None
        self._ran = self._failed = False
        self._later: deque[Callable[[], None]] = deque()
        self._going: set[Member] = set()
        """Who is gone, or about to go, though that was put off."""
        self._owed: list[int] = []
        """Optimizers whose last step nobody was there to run it after."""

    @property
    def busy(self) -> bool:
        """Whether a worker runs it now."""
        return self._asked is not None

    @property
    def owed(self) -> bool:
        """Whether weights were stepped, and nobody was left to run it."""
        return bool(self._owed)

    def put_off(self, action: Callable[[], None], member: Member | None = None) -> None:
        """Do this afterwards. `member`: it is gone, or about to go."""
        self._later.append(action)
        if member is not None:
            self._going.add(member)
            self._failed |= member is self._asked

    def catch_up(self) -> None:
        """Do what was put off."""
        while self._later and not self.busy:
            self._later.popleft()()

    def ran(self, member: Member) -> None:
        """A worker has run it."""
        if member is not self._asked:
            raise RunError(f"rank {member.rank} ran something that nobody had asked it to.")
        self._ran = True

    def run(self, which: int, ranks: Iterable[int]) -> None:
        """An optimizer has stepped with gradients of these workers: ask one of them, or anybody who sleeps.

        Where nobody sleeps, because who pushed is gone, it is run after the next step."""
        if which not in self._owed:
            self._owed.append(which)
        first, tried = frozenset(ranks), set[int]()
        while self._owed and self._owner.halted is None:
            there = [each for each in self._owner.living if each not in self._going]
            asleep = [each for each in there if each.rank not in tried and _sleeps(each)]
            if not asleep:
                return
            member = min(asleep, key=lambda each: (each.rank not in first, each.rank))
            if self._runs(member, self._owed[0]):
                self._owed.pop(0)
            else:
                tried.add(member.rank)

    def _runs(self, member: Member, which: int) -> bool:
        """Whether this worker has run it, and the store has what came of it."""
        assert member.weights is not None, "where functions run after steps, workers have copies"
        self._owner.show_weights(member.weights)
        self._asked, self._ran, self._failed = member, False, False
        self._owner.send(member, m.RunAfterStep(which))
        try:
            while not (self._ran or self._failed or self._owner.halted):
                self._owner.attend(member)
        finally:
            self._asked = None
        if self._ran:
            member.asks = True
            self._owner.take_weights(member.weights)
        return self._ran


def _sleeps(member: Member) -> bool:
    """Whether its gradient was pushed and it waits: what lies in its memory nobody needs any more."""
    return member.asks and isinstance(member.said, m.Push) and not member.evaluates
