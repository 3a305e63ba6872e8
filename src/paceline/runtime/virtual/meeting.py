"""Where peers meet under a virtual clock: the same place, but what it answers takes its time.

Whatever is carried out is carried out at once, into memory that nobody reads yet; whoever it is for sleeps on
until the cluster's links would have brought it. So at every instant of virtual time each replica is what it
would be then, and an evaluation sees just that, without taking any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import inf

from paceline.protocols.core.meeting import Gathered
from paceline.protocols.rules.compression import parse_compression
from paceline.runtime.meeting.place import MeetingPlace
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.peer_start import PeerRun
from paceline.store.replicas import parameter_parts


class VirtualMeeting(MeetingPlace):
    """One per simulated run of peers."""

    records = False  # it repeats

    def __init__(self, run: PeerRun, owner: OwnerView) -> None:
        super().__init__(run, owner)
        parts = parameter_parts(run.store.layout, run.store.weights)
        size_bytes = sum(part.numel() * part.element_size() for part in parts)
        assert owner.virtual is not None
        self._virtual = owner.virtual
        self._costs = owner.virtual.costs(size_bytes, parse_compression(owner.config.compress))
        self._due: dict[int, float] = {}
        """When who is answered is to hear of it; who is not in here hears of it at once."""
        self._there_at: dict[tuple[int, int], float] = {}
        """When the answers to started operations are there, by rank and lane."""
        self._exchange_s = dict.fromkeys(run.replicas, 0.0)

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """A worker has come, and what it brings is under way."""
        call = message.call
        if call is not None:
            self._costs.came(member.rank, call, self._owner.now())
        super().meet(member, message, fds)

    def leave(self, member: Member) -> None:
        """A worker is gone, and what was under way to it."""
        self._due.pop(member.rank, None)
        super().leave(member)

    def _asked_for(self, asking: Iterable[int]) -> int | None:
        """What all have completed at this instant, since an evaluation takes no time."""
        return self._oldest if self._apart else None

    def _sees(self, rank: int, stage: int | None) -> bool:
        """Whoever asks does."""
        return True

    # -- how long it takes --------------------------------------------------------------------

    def _met(self, gathered: Gathered, began: float) -> float:
        takes_s = self._costs.joint(gathered, self._owner.now())
        for rank, spent in takes_s.items():
            if gathered.lane <= 0:
                self._under_way(rank, spent)
            else:
                self._there_at[rank, gathered.lane] = self._owner.now() + spent
        return max(takes_s.values())

    def _spent_on(self, rank: int, spent: float) -> float:
        return self._exchange_s[rank]

    def _traded(self, rank: int, there_bytes: int, back_bytes: int, began: float, lane: int) -> float:
        spent = self._costs.exchange(rank, there_bytes, back_bytes, self._owner.now())
        if lane:
            self._there_at[rank, lane] = self._owner.now() + spent
        else:
            self._under_way(rank, spent)
        return spent

    def _file(self, gathered: Gathered, done: dict[int, m.Met]) -> dict[int, m.Met]:
        asked = super()._file(gathered, done)
        for rank in asked:
            self._arrives(rank, gathered.lane)
        return asked

    def _started_before(self, rank: int, message: m.Meet) -> dict[int, m.Met]:
        if message.test:
            asking_s = self._costs.ask(rank, self._owner.now())
            there = self._there_at.get((rank, message.wait), inf) <= self._owner.now() + asking_s
            if asking_s:
                self._under_way(rank, asking_s)
                self._asleep.travels(rank, asking_s)
            return {rank: m.Met(there)}
        answers = super()._started_before(rank, message)
        if answers and message.wait:
            self._arrives(rank, message.wait)
            self._asleep.travels(rank, self._exchange_s[rank])
        return answers

    def _arrives(self, rank: int, lane: int) -> None:
        """It waits for what is under way, or has arrived before."""
        self._under_way(rank, max(0.0, self._there_at.pop((rank, lane)) - self._owner.now()))

    def _under_way(self, rank: int, spent: float) -> None:
        self._due[rank], self._exchange_s[rank] = self._owner.now() + spent, spent

    # -- what becomes of it -------------------------------------------------------------------

    def _book(self, member: Member | None, push: m.Push | None, answered: set[int], spent: float) -> None:
        super()._book(member, push, answered, 0.0 if member is None else self._exchange_s[member.rank])

    def _answer(self, answers: dict[int, m.Met]) -> None:
        """Wake them when their answers have come, unless all are to sleep."""
        if self._holds:
            self._held |= answers
            return
        at_once = {rank: met for rank, met in answers.items() if rank not in self._due}
        for rank in sorted(answers.keys() - at_once):
            wake = partial(self._wake, self._members[rank], answers[rank])
            self._virtual.put_off(self._due.pop(rank), rank, wake)
        super()._answer(at_once)
