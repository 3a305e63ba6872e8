"""Who leads a run, which means printing and evaluating for all, and who does so when that worker is gone.

Rank 0 begins. Who is lost is followed at once by the lowest rank that is left. Who leaves in good order has
mostly done what there was to do, and the others are about to leave as well: it is followed only if training
goes on beyond what it has seen. A rank that comes back finds its place as lead taken.

A worker hears of it with the answer to a push or to the end of an epoch. These points of a script are on
record, so a replay tells it at the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.trace.events import AnyEvent, Event, LeadPassed


class LeftAt(NamedTuple):
    """How far a lead had come that left in good order."""

    epoch: int
    """The last epoch whose end it has seen; -1: none."""
    clock: int


class Leading:
    """One per run, which tells it who comes, goes and pushes."""

    def __init__(
        self,
        write: Callable[[Event], None],
        now: Callable[[], float],
        living: Callable[[], Iterable[Member]],
    ) -> None:
        """`living`: the members that are left."""
        self._write, self._now, self._living = write, now, living
        self.rank: int | None = 0
        """Who leads; None: nobody was left when the last one went."""
        self._told = True
        """Whether that worker knows."""
        self._seen: LeftAt | None = None
        """Set once the lead has left in good order."""
        self._recorded: dict[int, LeadPassed] | None = None

    def follow(self, record: Iterable[AnyEvent]) -> None:
        """Pass the lead on where a recorded run did, and nowhere else."""
        self._recorded = {event.worker: event for event in record if isinstance(event, LeadPassed)}

    def welcomes(self, rank: int) -> bool:
        """Whether a worker that says who it is leads."""
        if self.rank is None:
            self.rank, self._told = rank, True
        if self.rank == rank:
            self._seen = None
        return self.rank == rank and self._told

    def gone(self, member: Member, reason: str, run: Run | None) -> None:
        """A worker is gone."""
        if member.rank != self.rank or reason == "stopped":
            return
        if reason in ("died", "failed") or not self._told:
            self._pass_on(run)
        else:
            clock = 0 if run is None else run.ledger.pacer.clocks.completed.get(member.rank, 0)
            self._seen = LeftAt(member.seen_epoch, clock)

    def pushed(self, member: Member, push: m.Push, run: Run) -> None:
        """Training goes on, maybe beyond what the last lead has seen."""
        seen = self._seen
        if seen is None:
            return
        farther = run.ledger.pacer.clocks.completed.get(member.rank, 0) > seen.clock
        if push.used:
            epoch = max(batch.epoch for batch in push.used)
            farther = epoch > seen.epoch + 1 or (epoch == seen.epoch + 1 and farther)
        if farther:
            self._pass_on(run)

    def tells(self, member: Member, run: Run) -> bool:
        """Whether a worker hears with this answer that it leads."""
        if self._told and self._recorded is None:
            return False
        said = member.said
        epoch = said.epoch if isinstance(said, m.Linger) else None
        clock = run.ledger.pacer.clocks.completed.get(member.rank, 0)
        if self._recorded is not None:
            return self._as_recorded(member.rank, clock, epoch)
        if member.rank != self.rank:
            return False
        self._told = True
        self._write(LeadPassed(self._now(), member.rank, clock, epoch))
        return True

    def _as_recorded(self, rank: int, clock: int, epoch: int | None) -> bool:
        assert self._recorded is not None
        due = self._recorded.get(rank)
        if due is None or (due.clock, due.epoch) != (clock, epoch):
            return False
        del self._recorded[rank]
        self._write(LeadPassed(self._now(), rank, clock, epoch))
        return True

    def _pass_on(self, run: Run | None) -> None:
        """To the lowest rank, but not to one that is parked."""
        benched = frozenset[int]() if run is None else frozenset(run.ledger.pacer.clocks.benched)
        heirs = sorted(self._living(), key=lambda each: (each.rank in benched, each.rank))
        self.rank = heirs[0].rank if heirs else None
        self._told, self._seen = not heirs, None
        if run is not None and run.ledger.parking is not None and self.rank is not None:
            run.ledger.parking.lead = self.rank
