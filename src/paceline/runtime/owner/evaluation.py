"""A worker evaluates: on weights that stand still for it, while nobody waits who need not."""

from __future__ import annotations

from collections.abc import Callable

from paceline.protocols import Decision
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.trace import TraceWriter, events


class StoreEvaluation:
    """What `pace.evaluate` asks of the owner of a store; peers have a way of their own."""

    def __init__(
        self,
        run: Run,
        trace: TraceWriter,
        now: Callable[[], float],
        follow: Callable[[Decision | None], None],
        send: Callable[[Member, m.FromStore], None],
        simulated: bool,
    ) -> None:
        self._run, self._trace, self._now = run, trace, now
        self._follow, self._send, self._simulated = follow, send, simulated

    def away(self, member: Member) -> None:
        """The lead evaluates what it is given now; outside of lockstep nobody waits for it."""
        ledger = self._run.ledger
        member.snapshot = (self._now(), ledger.pacer.clocks.version, ledger.applied)
        if not (ledger.pacer.in_lockstep or self._simulated):
            self._follow(ledger.leave(member.rank, self._now(), "away"))
        member.evaluates = True
        self._refresh(member, copy=True)

    def back(self, member: Member, message: m.Back, distance: dict[str, float] | None) -> None:
        """It has evaluated; `distance` is how far apart peers were, who keep weights of their own."""
        ledger = self._run.ledger
        t, version, samples = member.snapshot
        seconds = 0.0 if self._simulated else message.seconds
        values = message.values | (distance or {})
        self._trace.write(events.Evaluated(t, member.rank, version, samples, values, seconds))
        if not ledger.pacer.clocks.is_present(member.rank):
            self._follow(ledger.join(member.rank, self._now(), member.pid))
        member.evaluates = False
        self._refresh(member, copy=distance is None)

    def step_aside(self, member: Member) -> None:
        """Let nobody wait for it, until it steps in again."""
        self._follow(self._run.ledger.leave(member.rank, self._now(), "away"))

    def step_in(self, member: Member) -> None:
        """It takes part again."""
        self._follow(self._run.ledger.join(member.rank, self._now(), member.pid))

    def unmarked(self, member: Member, message: m.FromWorker) -> bool:
        """Whether this is of an evaluation that leaves no mark on record: in lockstep nobody steps aside."""
        pacer = self._run.ledger.pacer
        if isinstance(message, m.Away):
            return pacer.in_lockstep
        return isinstance(message, m.Back) and pacer.clocks.is_present(member.rank)

    def _refresh(self, member: Member, copy: bool) -> None:
        """Fresh weights outside of an iteration."""
        if member.weights is not None and copy:
            store, memory = self._run.store, member.weights.bytes
            store.copy_weights(memory) if member.evaluates else store.hand_out(memory)
        ledger = self._run.ledger
        self._send(member, m.Release(ledger.pacer.clocks.version, ledger.position()))
