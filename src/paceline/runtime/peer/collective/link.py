"""A worker's side of the conversation, when vectors travel by a collective fabric.

While it sleeps, a worker may be asked for something in between: to take part in the mean of all models, or,
after its own end, in what the others go on with. It does so and sleeps on.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.errors import RunError, RunStopped
from paceline.fabric.channel import Channel
from paceline.fabric.collective import LOOK_S, PATIENCE_S, Torn
from paceline.fabric.presence import Allowance
from paceline.fabric.segment import Segment
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages import workers as m
from paceline.runtime.worker.link import StoreLink
from paceline.store.layout import Layout
from paceline.store.work.due import LoaderPasses

T = TypeVar("T")
Order = m.Stand | m.Show


class CollectiveLink(StoreLink):
    """Requests, answers, and what is asked in between."""

    def __init__(
        self,
        channel: Channel,
        protocol: str | None,
        settings: dict[str, Any],
        rank: int | None = None,
        correct: str | None = None,
        trigger: float | None = None,
    ) -> None:
        self._early: deque[tuple[m.FromStore, list[int]] | None] = deque()
        """What arrived while this worker was busy."""
        super().__init__(channel, protocol, settings, rank, correct, trigger)

    meeting = -1
    """Descriptor of the memory through which workers find each other."""
    halted = False
    """Whether it was told that the run is over."""
    obey: Callable[[Order], None]
    """Does what is asked in between."""

    def _further(self, fds: list[int], layout: Layout) -> list[Segment]:
        if fds:
            self.meeting = fds[0]
        return []

    def leave(
        self,
        values: dict[str, float] | None,
        waits: bool = False,
        state: WorkerState | None = None,
        passes: LoaderPasses | None = None,
    ) -> None:
        """Done; but the others may not be, and go on over all ranks."""
        if self.meeting >= 0 and not self.halted:
            self.meet(m.Meet(carried=m.Carried(rests=True)))
        super().leave(values, waits, state, passes)

    def look(self) -> None:
        """Raise if the run is over; what else has arrived is kept for later."""
        while select.select([self._channel], [], [], 0)[0]:
            received = super()._receive()
            self._early.append(received)
            if received is None or isinstance(received[0], m.Halt):
                self._early = deque([received])
                self._expect(m.Halt)

    def _receive(self) -> tuple[m.FromStore, list[int]] | None:
        return self._early.popleft() if self._early else super()._receive()

    def torn(self, why: str) -> RunError:
        """An exchange broke off: wait to be told whom the run has lost. What to raise if nobody tells."""
        self._send(m.Meet(carried=m.Carried(torn=why)))
        patience = Allowance(PATIENCE_S)
        while not patience.over:
            self.look()
            time.sleep(LOOK_S)
        return RunError(f"rank {self.rank}: {why} Read the other ranks' logs.")

    def _expect(self, kind: type[T]) -> tuple[T, list[int]]:
        wanted: Any = kind | m.Stand | m.Show
        while True:
            try:
                message, fds = super()._expect(wanted)
            except RunStopped:
                self.halted = True
                raise
            if not isinstance(message, m.Stand | m.Show):
                return message, fds
            try:
                self.obey(message)
            except Torn as error:
                raise self.torn(str(error)) from None
