"""Replay: a recorded run carried out again, verdict by verdict.

An asynchronous run is not repeatable, because arrivals are not. But given the order of arrivals, the
work behind each push and the times the protocol saw, everything else follows: the same workers
compute the same gradients on the same weights, and the store arrives at the same bits. So real
workers are started, and the owner hears them in the order of the record, at the recorded times.
Whatever they say too early waits. Of peers every word is on record, not pushes alone: who came first to a
cell, and what had arrived when somebody asked for it, follows from their order.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from collections.abc import Iterable

from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.fabric.stop_signals import why_stopped
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.owner import Owner
from paceline.runtime.run.member import Member
from paceline.runtime.virtual.replay_meeting import ReplayMeeting
from paceline.trace.events import (
    AnyEvent,
    Asked,
    Came,
    Decided,
    Evaluated,
    Passed,
    Rested,
    WorkerJoined,
    WorkerLeft,
)

PATIENT = (m.Push, m.BarrierPassed, m.Meet, m.Away, m.Back, m.Leave, m.Failed)
"""What is heard at its recorded time only; requests for work and remarks are answered at once."""


class ReplayLoop:
    """Attends to workers in the order of a record."""

    def __init__(self, record: Iterable[AnyEvent], until: int | None, stop: int) -> None:
        """`until`: the number of the verdict after which to stop."""
        self.now = 0.0
        self._record = list(record)
        self._until = until
        self._stop = stop
        self._held: dict[int, deque[tuple[m.FromWorker, list[int]]]] = {}

    def clock(self) -> float:
        """The recorded time of what is being carried out."""
        return self.now

    def attach(self, owner: Owner, workers: list[tuple[Channel, int]]) -> None:
        """The run to carry out."""
        self._owner = owner
        owner.leading.follow(self._record)
        owner.attend = lambda member: self._listen()
        for rank, (channel, pid) in enumerate(workers):
            owner.add(rank, channel, pid)
            self._held[rank] = deque()

    def run(self) -> None:
        """Until the record ends, or the verdict asked for."""
        self._leave_out()
        while self._owner.halted is None and not all(x.registered for x in self._owner.living):
            self._listen()
        seen: set[int] = set()
        for event in self._record:
            if self._owner.halted is not None:
                break
            self.now = max(self.now, event.t)
            self._carry_out(event, seen)
            if isinstance(event, Decided) and self._until is not None and event.number >= self._until:
                self._owner.halt("stopped", f"replayed up to verdict {event.number}")
        if self._owner.living:
            self._owner.halt("stopped", "the record ends here")
            self._drain()

    def _leave_out(self) -> None:
        """Who was lost before training began takes no part this time either."""
        joined = {event.worker for event in self._record if isinstance(event, WorkerJoined)}
        for event in self._record:
            if isinstance(event, WorkerLeft) and event.worker not in joined and event.detail:
                member = self._owner.members[event.worker]
                member.gone = member.lost = True
                self._owner._gathering.absent.append(event)
                self._kill(member, event.detail)

    def _carry_out(self, event: AnyEvent, seen: set[int]) -> None:
        members = self._owner.members
        if isinstance(event, Decided) and event.pushed is not None:
            self._hear(members[event.pushed], "Push")
        elif isinstance(event, Passed):
            self._hear(
                members[event.worker], "BarrierPassed", instead=m.BarrierPassed(event.looks, event.asked)
            )
        elif isinstance(event, Came):
            self._hear(members[event.worker], "Meet", "Away")
        elif isinstance(event, Evaluated) and self._owner.family.meets:
            self._hear(members[event.worker], "Back")
        elif isinstance(event, Rested):
            self._rest()
        elif isinstance(event, Asked):
            self._owner.timer()
        elif isinstance(event, WorkerJoined):
            if event.worker in seen:
                self._hear(members[event.worker], "Back")
            seen.add(event.worker)
        elif isinstance(event, WorkerLeft) and event.reason in ("died", "failed"):
            self._kill(members[event.worker], event.detail)
        elif isinstance(event, WorkerLeft) and event.reason != "stopped":
            self._hear(members[event.worker], "Away" if event.reason == "away" else "Leave")

    def _hear(self, member: Member, *due: str, instead: m.BarrierPassed | None = None) -> None:
        """Wait for what the record says comes next from this worker; `instead`: what it said then."""
        while not self._held[member.rank] and not member.gone and self._owner.halted is None:
            self._listen()
        if not self._held[member.rank]:
            return
        message, fds = self._held[member.rank].popleft()
        said = _kind(message)
        if said in due:
            self._owner.handle(member, instead or message, fds)
        elif said in ("Away", "Back") and not self._owner.family.meets:
            self._owner.handle(member, message, fds)  # in lockstep an evaluation leaves no mark on record
            self._hear(member, *due, instead=instead)
        else:
            text = f"rank {member.rank} said {said} when {' or '.join(due)} was due"
            self._owner.halt("failed", f"replay left the record: {text}")

    def _rest(self) -> None:
        """Take the mean of all peers, as soon as all sleep that slept then."""
        while self._owner.halted is None and any(
            not (x.asks or self._held[x.rank]) for x in self._owner.living
        ):
            self._listen()
        if isinstance(self._owner.family, ReplayMeeting):
            self._owner.family.rest()

    def _listen(self) -> None:
        """Take in what workers say; nobody is heard further than its next message of weight."""
        attentive = {x.near.fileno(): x for x in self._owner.living if not self._held[x.rank]}
        ready, _, _ = select.select([*attentive, self._stop], [], [])
        for fd in ready:
            if fd == self._stop:
                self._owner.halt("stopped", why_stopped(self._stop))
            elif not attentive[fd].gone:
                self._take(attentive[fd])

    def _take(self, member: Member) -> None:
        received = None
        with contextlib.suppress(RunError, OSError):
            received = member.near.receive(m.worker_decoder)
        if received is None:
            self._owner.lost(member, "its process ended")
        elif isinstance(received[0], m.Enough):
            pass  # what follows from it is not replayed
        elif self._is_due_later(member, received[0]):
            self._held[member.rank].append(received)
        else:
            self._owner.handle(member, *received)

    def _is_due_later(self, member: Member, message: m.FromWorker) -> bool:
        """Who fails before training has no time on record; nor has an evaluation that the others wait for."""
        if not member.registered or not isinstance(message, PATIENT):
            return False
        evaluates = isinstance(message, m.Away | m.Back) and not self._owner.family.meets
        return not (evaluates and self._owner.evaluating.unmarked(member, message))

    def _kill(self, member: Member, detail: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        self._owner.lost(member, detail)

    def _drain(self) -> None:
        for member in self._owner.living:
            for message, fds in self._held[member.rank]:
                self._owner.handle(member, message, fds)
            while not member.gone:
                self._held[member.rank].clear()
                self._take(member)
                for message, fds in self._held[member.rank]:
                    self._owner.handle(member, message, fds)


def _kind(message: m.FromWorker) -> str:
    """What it is on record: a peer's first word of an iteration is its push."""
    if isinstance(message, m.Meet) and message.push is not None:
        return "Push"
    return type(message).__name__
