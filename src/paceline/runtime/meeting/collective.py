"""The owner's half of a run of peers whose vectors travel by a collective fabric.

It is still the place where workers meet: it says who takes part in what, in which shares, and keeps the
books. But it sees no vectors. What it cannot do without them, the workers do when it asks: while they sleep,
they take the mean of all models, to be evaluated and saved; those who have finished take part with nothing in
what the others go on with. A lost worker ends the run: a group that misses one reduces nothing any more.
"""

from __future__ import annotations

from paceline.errors import WorkerFailed
from paceline.fabric.segment import Segment
from paceline.protocols.core.meeting import Call, Gathered
from paceline.runtime.meeting.place import MeetingPlace
from paceline.runtime.messages import workers as m
from paceline.runtime.run.family import Concluded
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.peer_start import PeerRun
from paceline.store.replicas import (
    BUFFERS,
    answer_bytes,
    answer_parts,
    buffer_parts,
    parameter_parts,
)

MOST_GROUPS = 32
"""Groups that are connected for good; further ones, of a pattern drawn at random, exchange by pairs."""


class CollectiveGroups:
    """Which groups there are, the same for all who take part: each of them is connected once."""

    def __init__(self, everybody: tuple[int, ...], most: int = MOST_GROUPS) -> None:
        self._everybody, self._most = everybody, most
        self._known = {everybody}

    def among(self, call: Call, receivers: tuple[int, ...], begun: bool = False) -> tuple[int, ...]:
        """Whose group reduces; nobody's for one worker alone, or where groups would be too many."""
        group = call.group or self._everybody
        if begun or call.lane > 0:
            return group
        if len(receivers) == 1 or (group not in self._known and len(self._known) >= self._most):
            return ()
        self._known.add(group)
        return group


class CollectiveMeeting(MeetingPlace):
    """One per run."""

    records = False  # nobody could follow: most of what happens is between the workers

    def __init__(self, run: PeerRun, owner: OwnerView) -> None:
        super().__init__(run, owner)
        self._everybody = tuple(sorted(run.replicas))
        self._calls: dict[tuple[int, int], Call] = {}
        """What workers came to, by rank and lane."""
        self._carried: dict[int, m.Carried] = {}
        """What else they said when they came last."""
        self._circles = CollectiveGroups(self._everybody)
        self._finished: set[int] = set()
        """Who has done its last iteration, and takes part with nothing."""
        self._resting: set[int] = set()
        """Who of these has nothing more to do at all."""
        self._orders: list[tuple[int, m.Stand]] = []
        self._saved: Segment | None = None

    # -- meeting ------------------------------------------------------------------------------

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """A worker has come, or has something else to say."""
        carried = message.carried or m.Carried()
        if carried.rests:
            return self._rest(member)
        if carried.mean:
            self._saved = Segment(fds[0], answer_bytes(self._layout))
            return self._saved.close_fd()
        if carried.torn:
            return self._torn(member)
        if message.call is not None:
            self._calls[member.rank, message.call.lane] = message.call
            self._carried[member.rank] = carried
        if message.retires:
            self._finish(member)
        return super().meet(member, message, fds)

    def _finish(self, member: Member) -> None:
        """It has done its last iteration: its clock stands still, and what it drew is for the others."""
        ledger = self._run.ledger
        self._finished.add(member.rank)
        member.looping = False
        ledger.leave(member.rank, self._owner.now(), "away")
        if ledger.budget is not None:
            ledger.budget.give_back(member.rank)

    def _torn(self, member: Member) -> None:
        """Its exchange broke off. Who was lost will be known in a moment, and ends the run for all."""
        word = self._owner.last_word
        if word is not None:
            self._send(member, word)

    def _average(self, gathered: Gathered) -> dict[int, m.Met]:
        """Tell everybody to reduce; those of the group who have finished, with nothing."""
        lane, receivers, row = gathered.lane, gathered.receivers, gathered.rows[gathered.receivers[0]]
        brought = [self._run.replicas[rank].brought(gathered.turn) for rank in row]
        missing = tuple(sorted(frozenset.intersection(*(each.missing for each in brought))))
        calls = [self._calls.pop((rank, lane)) for rank in row]
        said = [self._carried[rank] for rank in receivers if lane == 0]
        bucketed = any(each.bucketed for each in said)
        joint = self._joint(row, calls, said, self._circles.among(calls[0], receivers, begun=bucketed))
        plain = not bucketed or joint.changed or joint.again
        order = m.Stand(joint.among, brought[0].place == BUFFERS, lane, bucketed, plain, gathered.part)
        idle = sorted(self._finished.intersection(joint.among).difference(receivers))
        self._orders += [(rank, order) for rank in idle]
        return dict.fromkeys(receivers, m.Met(missing=missing, joint=joint))

    @staticmethod
    def _joint(
        row: dict[int, float], calls: list[Call], said: list[m.Carried], among: tuple[int, ...]
    ) -> m.Joint:
        weights = [call.weight for call in calls]
        total = sum(weights)
        return m.Joint(
            among,
            row,
            total=total if total > 0 else float(len(weights)),
            changed=any(each.changed for each in said),
            again=any(each.void for each in said) or (total > 0 and 0.0 in weights),
        )

    def _mix(self, gathered: Gathered) -> dict[int, m.Met]:
        """Tell a worker whose vectors it gets, and who gets its own; all who are connected are told now."""
        (rank,) = gathered.receivers
        self._calls.pop((rank, gathered.lane))
        return {rank: m.Met(joint=m.Joint((), gathered.rows[rank], gathered.takers))}

    def _answer(self, answers: dict[int, m.Met]) -> None:
        """Wake them, unless all are to sleep, and ask those who have finished to take part."""
        if self._last_word is not None:
            self._held |= answers
            return
        if not self._asking:
            orders, self._orders = self._orders, []
            for rank, order in orders:
                self._ask(self._members[rank], order)
        super()._answer(answers)

    def _ask(self, member: Member, order: m.Stand | m.Show) -> None:
        """Ask a sleeping worker for something in between."""
        asleep = member.asks
        self._send(member, order)
        member.asks = asleep

    def leave(self, member: Member) -> None:
        """A worker is gone; if it was lost, so is the run."""
        if member.lost:
            fabric = self._owner.config.fabric
            raise WorkerFailed(
                f"rank {member.rank} was lost, and over {fabric} the others cannot continue without it. "
                "Start again, or use --fabric shared, where the others continue"
            )
        super().leave(member)

    # -- evaluation and the end ---------------------------------------------------------------

    def _rest(self, member: Member) -> None:
        self._resting.add(member.rank)
        self._standing.left(member.rank)

    def look(self) -> None:
        """See whether everybody sleeps that has to, or all have come to the end."""
        living = self._owner.living
        over, asleep = self._last_word, all(member.asks for member in living)
        if over is not None and asleep:
            self._take_mean(save=True)
            for member in living:
                self._send(member, over)
        elif living and all(member.rank in self._resting for member in living):
            self._resting.clear()  # they are told once
            self._take_mean(save=True)
            for member in living:
                self._send(member, m.Met())
        elif over is None:
            super().look()

    def _show(self, asking: dict[int, m.Away]) -> None:
        """Have the mean of all models taken: everybody finds it, and how far all are from it, at home."""
        clocks, ledger = self._run.ledger.pacer.clocks, self._run.ledger
        self._take_mean()
        for rank, message in sorted(asking.items()):
            member = self._members[rank]
            if not message.distance:
                member.snapshot = (self._owner.now(), clocks.version, ledger.samples)
            self._send(member, m.Release(clocks.version, clocks.clock(rank)))

    def _take_mean(self, save: bool = False) -> None:
        """All who are there take it together; if somebody is not, nobody can."""
        living = self._owner.living
        if len(living) < len(self._everybody):
            return
        stayed = self._standing.stayed()
        counted = self._standing.counted(stayed)
        for member in living:
            share = 1.0 / len(counted) if member.rank in counted else 0.0
            hand_over = save and member is living[0]
            self._ask(member, m.Show(share, len(stayed), member.rank in stayed, hand_over))

    def conclude(self, lead: Member) -> Concluded:
        """Put the mean of all models where it is saved from; the lead's own if there is none."""
        assert lead.segment is not None
        assert lead.weights is not None
        if self._saved is None:
            self._run.store.weights.copy_(lead.weights.bytes)
            if not self._run.protocol.agrees:
                self._owner.note(
                    "warning", f"the saved model is the replica of rank {lead.rank}, not the mean"
                )
            return self._concluded()
        mean, buffers = answer_parts(self._layout, self._saved.bytes)
        for target, part in zip(parameter_parts(self._layout, self._run.store.weights), mean, strict=True):
            target.copy_(part)
        for target, part in zip(buffer_parts(self._layout, lead.segment.bytes), buffers, strict=True):
            target.copy_(part)
        return self._concluded()
