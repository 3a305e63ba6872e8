"""The owner's half of a peer run: the place where workers meet.

A worker that comes to a joint operation sleeps until it is answered, so its memory lies still: the
owner reads it there, adds up, and writes the answer to memory that its receivers read. One process
carries every operation out, so all who take part see the same members and the same bits, and a worker
killed at any instant is either in the sum or not.

To be evaluated, the run needs all replicas at rest: from the moment the lead asks, whoever comes is
kept asleep until everybody sleeps. Then the mean is taken, and all go on but the lead. The same for
whoever asks how far apart the replicas are.

Where workers are apart, nobody is kept: the mean is that of all replicas after as many iterations as the one
has done who asks, and is taken when all have done so many. Each keeps what it was until nobody asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from paceline.errors import RunError
from paceline.fabric.segment import Segment
from paceline.protocols import Decision
from paceline.protocols.core.meeting import Gathered, Meeting
from paceline.protocols.core.peer_books import PeerBooks
from paceline.runtime.meeting.checkpoint import PeerCheckpoints
from paceline.runtime.meeting.membership import ReplicaMembership
from paceline.runtime.meeting.stages import Stages
from paceline.runtime.meeting.sums import JointSums, far_peers
from paceline.runtime.messages import workers as m
from paceline.runtime.run.alike import check_alike
from paceline.runtime.run.family import Concluded
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.peer_start import PeerRun, saved_peers
from paceline.store.replicas import (
    BUFFERS,
    PARAMETERS,
    Brought,
    Parts,
    answer_bytes,
    buffer_parts,
    parameter_parts,
)
from paceline.trace import events

LAST_ITERATIONS = 3
"""How many iterations a worker may still need when the run is stopped, and save its state."""

NO_MORE_PEERS = (
    "a peer run that has begun cannot take in new workers, because they would need the state of the others."
)


class MeetingPlace:
    """One per run of peers."""

    meets: ClassVar[bool] = True
    closed: ClassVar[str] = NO_MORE_PEERS
    records: ClassVar[bool] = True
    """Whether the order in which workers come is put on record, for a replay."""

    def __init__(self, run: PeerRun, owner: OwnerView) -> None:
        """Answers are sent, batches drawn and reports written as the owner does it for everybody."""
        self._run, self._owner, self._members = run, owner, owner.members
        self._send, self._draw, self._report = owner.send, owner.draw, owner.report
        roll = run.ledger.pacer.protocol
        assert isinstance(roll, PeerBooks)
        self._roll = roll
        self._meeting, self._asleep = Meeting(), run.ledger.asleep
        self._layout, self._sums = run.store.layout, JointSums(run, owner)
        self._unreleased: set[int] = set()
        self._held: dict[int, m.Met] = {}
        self._ready: dict[tuple[int, int], m.Met] = {}
        """Answers to started operations, by rank and lane."""
        self._waiting: dict[int, int] = {}
        """Who waits for one of these, and for which."""
        self._asking: dict[int, m.Away] = {}
        """Who wants to evaluate, or to know how far apart the replicas are."""
        self._standing = ReplicaMembership(run, owner.members)
        self._keeping = PeerCheckpoints(run, owner, self._standing, self._mean)
        self._until: int | None = None
        self._longest_s = 0.0
        self._stages = Stages(run.replicas, owner.members)
        self.distance: dict[str, float] | None = {}
        """How far apart the replicas were at the last evaluation, under its name."""
        self._apart = run.protocol.apart and not owner.config.connects
        """Whether workers keep what they were, since they are not all at the same iteration."""
        for rank in run.replicas:
            self._meeting.join(rank)

    def carry_out(self, decision: Decision) -> float:
        """Peers carry out by themselves what the books say."""
        return 1.0

    def push(self, member: Member, push: m.Push) -> None:
        """Only workers with a store push."""
        raise RunError(f"rank {member.rank} pushed a gradient, but this run has no store.")

    def missing(self, rank: int) -> list[int] | None:
        """Who has not come to the meeting that this worker waits in; None: it waits in none."""
        return self._meeting.missing(rank, self._waiting.get(rank, 0))

    # -- meeting ------------------------------------------------------------------------------

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """A worker has come."""
        self._heard_at = self._owner.now()
        if message.push is None and message.saved is None:
            self._note(events.Came(self._heard_at, member.rank))
        replica = self._run.replicas[member.rank]
        for fd in fds:
            lent = Segment(fd, answer_bytes(self._layout))
            lent.close_fd()
            replica.lend(lent.bytes)
        self._sums.packages.came(member, replica, message)
        replica.model, replica.stage = message.model, message.stage
        if self._apart:
            replica.stood(message.stage, message.stood)
        replica.stand_in = None if message.cell is None else self._sums.cells[message.cell]
        began = time.perf_counter()
        if not message.goes_on:
            self._asleep.came(member.rank, self._owner.now(), pushes=message.push is not None)
        if message.push is not None:
            self._unreleased.add(member.rank)
            member.settings = message.push.settings or member.settings
            member.told(message.push)
        if message.trade is not None:
            member.asks = message.lane == 0
            answers = self._trade(member.rank, message)
        elif message.call is not None:
            brought = Brought(message.place, message.into, frozenset(message.missing))
            replica.bring(message.call.turn, brought)
            member.asks = message.call.lane <= 0
            answers = self._carry_out(self._meeting.arrive(member.rank, message.call))
        elif message.stands:
            member.asks, answers = False, {}
        elif message.retires:
            member.asks = False
            answers = self._carry_out(self._meeting.retire(member.rank)) | self._keeping.end()
        elif message.saved is not None:
            answers = self._keeping.saved(member.rank, message.saved)
        else:
            answers = self._started_before(member.rank, message)
        self._book(member, message.push, set(answers), time.perf_counter() - began)
        self._answer(answers)

    def _trade(self, rank: int, message: m.Meet) -> dict[int, m.Met]:
        """An exchange that nobody has to come to."""
        began, now, lane = time.perf_counter(), self._owner.now(), message.lane
        self._run.ledger.met = True
        there, back = self._sums.trade(rank, message, self._meeting.active)
        spent = self._traded(rank, there, back, began, lane)
        both = there, spent, None if there == back else back
        ahead = self._is_ahead(lane)
        self._owner.trace.write(events.Exchanged(now, "exchange", (rank,), *both, ahead=ahead))
        if not lane:
            self._asleep.travels(rank, spent)
            return {rank: m.Met()}
        self._ready[rank, lane] = m.Met()
        for line in far_peers(self._members, [rank]):
            line.send_ahead(lane, 0)
        return {}

    def _started_before(self, rank: int, message: m.Meet) -> dict[int, m.Met]:
        """A worker asks for an operation it has started, or has come to the end of its iteration."""
        key = rank, message.wait
        if message.test or message.clock:  # the time is that on record, for a replay
            return {rank: m.Met(self._heard_at if message.clock else key in self._ready)}
        if message.wait == 0 or key in self._ready:
            return {rank: self._ready.pop(key, m.Met())}
        self._waiting[rank] = message.wait
        return {}

    def leave(self, member: Member) -> None:
        """A worker is gone: whoever waited for it only need not wait any more."""
        self._standing.left(member.rank)
        self._unreleased.discard(member.rank)
        self._held.pop(member.rank, None)
        self._waiting.pop(member.rank, None)
        answers = self._carry_out(self._meeting.leave(member.rank)) | self._keeping.end()
        self._book(None, None, set(answers), 0.0)
        self._answer(answers)

    def _carry_out(self, gathered: list[Gathered]) -> dict[int, m.Met]:
        answers: dict[int, m.Met] = {}
        for each in gathered:
            began, now = time.perf_counter(), self._owner.now()
            check_alike(each, self._run.replicas, self._members)
            self._run.ledger.met |= each.kind != "agree" and len(each.receivers) > 1
            if each.kind == "agree":
                done = dict.fromkeys(each.receivers, m.Met(each.outcome))
            else:
                done = self._average(each) if each.kind == "average" else self._mix(each)
            if each.last:
                self._forget(each)
            spent = self._met(each, began)
            done = done if each.lane <= 0 else self._file(each, done)
            for rank in done:
                self._asleep.travels(rank, self._spent_on(rank, spent))
            answers |= done
            given, got = each.given_bytes, each.answer_bytes if self._owner.virtual is None else None
            told = now, each.kind, each.receivers, given, spent, got
            self._owner.trace.write(events.Exchanged(*told, ahead=self._is_ahead(each.lane)))
        return answers

    def _is_ahead(self, lane: int) -> bool | None:
        """Whether workers went on after they had come to it; None: under this protocol they never do."""
        return lane > 0 if self._run.protocol.sends_ahead else None

    def _met(self, gathered: Gathered, began: float) -> float:
        """How long a joint operation has taken, or will."""
        return time.perf_counter() - began

    def _traded(self, rank: int, there_bytes: int, back_bytes: int, began: float, lane: int) -> float:
        """The same of an exchange."""
        return time.perf_counter() - began

    def _spent_on(self, rank: int, spent: float) -> float:
        """Of what a joint operation takes, one worker's part."""
        return spent

    def _forget(self, gathered: Gathered) -> None:
        """Nobody needs any more what was brought to an operation."""
        ranks = {rank for row in gathered.rows.values() for rank in row}
        for rank in self._run.replicas if gathered.kind == "mix" else ranks:
            self._run.replicas[rank].forget(gathered.turn)

    def _file(self, gathered: Gathered, done: dict[int, m.Met]) -> dict[int, m.Met]:
        """Keep answers until they are asked for; those who wait for them get them now."""
        lane = gathered.lane
        asked = {rank for rank in done if self._waiting.get(rank) == lane}
        self._ready |= {(rank, lane): met for rank, met in done.items() if rank not in asked}
        for rank in asked:
            del self._waiting[rank]
        for rank in sorted(done.keys() - asked):
            for line in far_peers(self._members, [rank]):
                line.send_ahead(lane, done[rank].number)
        return {rank: done[rank] for rank in asked}

    def _average(self, gathered: Gathered) -> dict[int, m.Met]:
        """One sum for all."""
        return self._sums.average(gathered)

    def _mix(self, gathered: Gathered) -> dict[int, m.Met]:
        """A mixture for each."""
        return self._sums.mix(gathered)

    def _note(self, event: events.Event) -> None:
        if self.records:
            self._owner.trace.write(event)

    # -- the books ----------------------------------------------------------------------------

    def _book(self, member: Member | None, push: m.Push | None, answered: set[int], spent: float) -> None:
        """An iteration's first word is a push; its first answer is a release."""
        ledger, now = self._run.ledger, self._owner.now()
        self._roll.answered = answered & self._unreleased
        for rank in self._roll.answered:
            self._asleep.released(rank, now)
        if member is not None and push is not None:
            member.looping, member.wants = True, push.want
            self._standing.iterations[member.rank] += 1
            self._longest_s = max(self._longest_s, push.compute_s)
            decision = ledger.push(member.rank, now, push.samples, push.used)
            fresh = msgspec.structs.replace(decision, staleness=0, read=decision.version)
            ledger.carried_out(fresh)
            ledger.pushed(fresh, now, push.samples, push.compute_s, spent, 1.0)
            self._report(member, push.values)
            self._keeping.look()
        elif self._roll.answered:
            ledger.carried_out(ledger.released(now))

    def _answer(self, answers: dict[int, m.Met]) -> None:
        """Wake them, unless all are to sleep."""
        if self._holds:
            self._held |= answers
            return
        for rank in sorted(answers):
            self._wake(self._members[rank], answers[rank])

    def _wake(self, member: Member, met: m.Met) -> None:
        self._asleep.woke(member.rank, self._owner.now())
        if member.gone:
            return
        if self._last_word is not None:
            self._send(member, self._last_word)
            return
        release = None
        if member.rank in self._unreleased:
            self._unreleased.discard(member.rank)
            clocks = self._run.ledger.pacer.clocks
            batch, lead = (
                self._draw(member) if member.wants else None,
                self._owner.leading.tells(member, self._run),
            )
            at, over = clocks.clock(member.rank) - member.again, self._run.ledger.enough
            release = m.Release(clocks.version, at, batch, over=over, lead=lead)
        told = {"members": self._meeting.active, "release": release, "until": self._until}
        met = msgspec.structs.replace(met, **told, save_at=self._keeping.at, oldest=self._oldest)
        self._send(member, met)

    @property
    def _holds(self) -> bool:
        """Whether whoever comes is kept asleep."""
        return bool(self._asking) and not self._apart

    @property
    def _oldest(self) -> int:
        """Iterations that all have completed; where that is the same for all, nobody has to know."""
        if not self._apart:
            return 0
        return self._stages.lowest(self._meeting.active)

    @property
    def _last_word(self) -> m.Halt | None:
        """What whoever comes is told instead of being answered; not while all go on to a common end."""
        return self._owner.last_word if self._until is None else self._owner.halted

    def stop(self, kind: str) -> float:
        """All are to end after the same iteration: the first that nobody has completed the gradient of.

        Answers how many seconds that may take.
        """
        resumable = self._run.protocol.resumable and self._owner.config.compress == "none"
        if not resumable or kind != "stopped":
            return 0.0
        self._until = self._standing.most + 1
        behind = self._standing.behind(member.rank for member in self._owner.living)
        return (LAST_ITERATIONS + behind) * self._longest_s

    # -- evaluation and the end ---------------------------------------------------------------

    def away(self, member: Member, message: m.Away) -> None:
        """Somebody wants to see the mean of all, as soon as all are at rest."""
        self._note(events.Came(self._owner.now(), member.rank))
        self._asking[member.rank] = message

    def look(self) -> None:
        """See whether everybody sleeps that has to."""
        if not self._asking:
            return
        self._asking = {rank: how for rank, how in self._asking.items() if not self._members[rank].gone}
        stage, living = self._asked_for(self._asking), self._owner.living
        if self._asking and not (self._at_rest and self._stages.fetched(living, stage)):
            return
        now = {rank: how for rank, how in self._asking.items() if self._sees(rank, stage)}
        self._asking = {rank: how for rank, how in self._asking.items() if rank not in now}
        held, self._held = self._held, {}
        if now:
            self._note(events.Rested(self._owner.now()))
            self._show(now)
        self._answer(held)

    def _asked_for(self, asking: Iterable[int]) -> int | None:
        """After how many iterations replicas are to be seen: as many as the first did who asks; None: now."""
        return self._stages.lowest(asking) if self._apart else None

    def _sees(self, rank: int, stage: int | None) -> bool:
        """Whether somebody who asks is to see the replicas as they were then."""
        return stage is None or self._stages[rank] == stage

    @property
    def _at_rest(self) -> bool:
        return all(self._lies_still(x, self._asked_for(self._asking)) for x in self._owner.living)

    def _lies_still(self, member: Member, stage: int | None) -> bool:
        if stage is None:
            return member.asks
        mixes = member.rank in self._waiting or self._meeting.missing(member.rank) is not None
        return self._stages.lies_still(member, stage, mixes)

    def _show(self, asking: dict[int, m.Away]) -> None:
        """Put the mean of all models where the lead finds it; all hear how far they are from it."""
        ledger = self._run.ledger
        clocks, now = ledger.pacer.clocks, self._owner.now()
        lead = min(asking, key=lambda rank: (asking[rank].distance, rank))
        target = self._run.replicas[lead].answer_like
        apart = self._mean(target(PARAMETERS), target(BUFFERS), self._asked_for(asking))
        for rank, message in sorted(asking.items()):
            member, told = self._members[rank], {"consensus_distance": apart}
            if message.distance:
                self._report(member, told)
            else:
                member.snapshot, self.distance = (now, clocks.version, ledger.samples), told
            at = clocks.clock(rank) - member.again
            self._send(member, m.Release(clocks.version, at, distance=apart))

    def _mean(self, parameters: Parts, buffers: Parts, stage: int | None = None) -> float:
        """The run's own model, as it stands or after so many iterations; how far the replicas are from it."""
        stayed = self._standing.stayed()
        return self._sums.mean(stayed, self._standing.counted(stayed), (parameters, buffers), stage)

    def conclude(self, lead: Member) -> Concluded:
        """Put the mean of those who took part to the end into the store and the lead's buffers."""
        assert lead.segment is not None
        buffers = buffer_parts(self._layout, lead.segment.bytes)
        mean = [part.clone() for part in buffers]
        self._mean(parameter_parts(self._layout, self._run.store.weights), mean)
        for part, value in zip(buffers, mean, strict=True):
            part.copy_(value)
        return self._concluded()

    def _concluded(self) -> Concluded:
        """How many have saved their state, if all have: then the run can be resumed."""
        saved = saved_peers(self._owner.config)
        return Concluded(saved, whole=saved is not None)
