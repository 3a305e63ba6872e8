"""The owner: the one process that holds the store, decides, and writes weights.

It reads messages, asks the ledger for a verdict, has the store carry it out, and answers. There
are no locks, so none can stay held: a worker killed at any instant leaves at most a gradient that
was never announced. A worker that waits is a request not yet answered; it sleeps in the kernel.
Weights are copied only into the segment of a worker that sleeps, or (in lockstep) live in one
buffer that changes only while all sleep, so nobody ever reads half an update.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

from paceline.config import RunConfig
from paceline.errors import ConfigError, PacelineError, RunError
from paceline.fabric.channel import WorkerLine
from paceline.fabric.segment import Segment
from paceline.protocols import Decision
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.meeting.place import MeetingPlace
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.after_step import AfterSteps
from paceline.runtime.owner.batches import BatchDispenser
from paceline.runtime.owner.endings import NEVER_PREPARED, last_remarks, run_ended, save_run
from paceline.runtime.owner.evaluation import StoreEvaluation
from paceline.runtime.owner.gather import Exchanging
from paceline.runtime.owner.lead import Leading
from paceline.runtime.owner.paced import PacedFamily
from paceline.runtime.owner.parting import hand_out, turn_away
from paceline.runtime.owner.recall import recall
from paceline.runtime.owner.release import ready
from paceline.runtime.run.family import TOO_EARLY, Family, NotBegun
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import VirtualTime
from paceline.runtime.run.peer_start import PeerRun, assemble
from paceline.runtime.run.run import Run
from paceline.runtime.run.start import RunStart
from paceline.store.ledger import run_not_begun
from paceline.store.work.budget import Batch
from paceline.trace import LastingTrace, events


class Owner:
    """Carries out one run. What arrives, and when, is the business of the loop that calls it."""

    def __init__(
        self,
        config: RunConfig,
        now: Callable[[], float],
        virtual: VirtualTime | None = None,
        meeting: type[MeetingPlace] = MeetingPlace,
    ) -> None:
        """`virtual`: in virtual time, what knows how long things take; None in a real run. `meeting`: where
        peers meet, as the run's fabric and clock need it."""
        self.config = config
        self.members: dict[int, Member] = {}
        self._by_rank: list[Member] = []
        self.halted: m.Halt | None = None
        self.on_release: Callable[[int], None] = lambda rank: None
        """Told of every worker that starts to compute; a virtual clock needs to know."""
        self.on_added: Callable[[int], None] = lambda rank: None
        """Told of every worker that is left to a barrier of its own."""
        self.attend: Callable[[Member], None] = lambda member: None
        """Wait for what this worker says next, and hear it; others may be heard too."""
        self.after_steps = AfterSteps(self)
        self.ask_at: float | None = None
        """When the protocol wants to be asked again, even if nothing happens."""
        self.trace = LastingTrace(config.path / "trace.jsonl", config.trace_limit_bytes)
        self._clock = now
        self._zero_s: float | None = None
        self.virtual = virtual
        self._simulated = virtual is not None
        self._gathering = RunStart(config)
        self._run: Run | None = None
        self.family: Family = NotBegun()
        """What the run is: paced, or of peers."""
        self._meeting = meeting
        self.keeping = CheckpointWriter(config, self.trace, self.now)
        self.stopping: m.Halt | None = None
        """What whoever is to be released is told instead: the run ends in good order."""
        self._planned_epochs: int | None = None
        self._waiting: list[Member] = []
        """Who has left, and waits for the model that is saved."""
        self.patience_s = 0.0
        """How much longer than usual workers may take to end once the run is stopped."""
        self.cores = os.cpu_count() or 1
        self._exchanging = Exchanging(self)
        self.leading = Leading(self.trace.write, self.now, lambda: self.living)

    # -- membership ---------------------------------------------------------------------------

    def add(self, rank: int, channel: WorkerLine, pid: int) -> Member:
        """A worker was started, or has come from another host."""
        member = self.members[rank] = Member(rank, channel, pid)
        self._by_rank = [self.members[each] for each in sorted(self.members)]
        return member

    @property
    def closed(self) -> str:
        """Why nobody can join any more; empty: it can."""
        return self.family.closed

    @property
    def expecting(self) -> bool:
        """Whether workers of other hosts are still to come."""
        return self._run is None and not self.ending and len(self.members) < self.config.workers

    def lost(self, member: Member, detail: str) -> None:
        """A worker died without a word."""
        if self.after_steps.busy:
            self.after_steps.put_off(partial(self.lost, member, detail), member)
        elif not member.gone:
            self._guarded(lambda: self._gone(member, "stopped" if self.ending else "died", detail))
            self.look()
            self.after_steps.catch_up()

    @property
    def living(self) -> list[Member]:
        """Members that are still there, by rank."""
        return [member for member in self._by_rank if not member.gone]

    @property
    def ending(self) -> bool:
        """Whether the run is over, or about to be."""
        return self.halted is not None or self.stopping is not None

    @property
    def last_word(self) -> m.Halt | None:
        """What workers are told that ask for more, once the run is over or about to be."""
        return self.halted or self.stopping

    def batches(self, samples: int) -> float:
        """How many of the loader's batches a push of so many samples counts for."""
        return self._started.ledger.batches([samples])

    def now(self) -> float:
        """Seconds since training began."""
        return 0.0 if self._zero_s is None else self._clock() - self._zero_s

    def fileno(self) -> int | None:
        """Readable when `turn` has something to do; None: it never has."""
        return None

    def turn(self) -> None:
        """Hear whoever else takes part in the store."""

    def conclude(self) -> None:
        """The loop is over: get back what others hold of the store."""

    # -- messages -----------------------------------------------------------------------------

    def handle(self, member: Member, message: m.FromWorker, fds: list[int]) -> None:
        """Act on one message; an error ends the run, not the owner."""
        if isinstance(message, m.AfterStepRan):
            self._guarded(self.after_steps.ran, member)
        elif self.after_steps.busy:
            goes = member if isinstance(message, m.Failed | m.Leave) else None
            self.after_steps.put_off(partial(self.handle, member, message, fds), goes)
        else:
            member.speaks(message)
            self._guarded(self._dispatch, member, message, fds)
            self.look()
            self.after_steps.catch_up()

    def look(self) -> None:
        """See whether peers sleep that have been waited for, and all is here that was."""
        if self.halted is None and self.family.meets:
            self._guarded(self.family.look)
        if self.halted is None and self._exchanging.open:
            self._guarded(self._exchanging.look)

    def _guarded(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except PacelineError as error:
            self.halt("config" if isinstance(error, ConfigError) else "failed", str(error))

    def _dispatch(self, member: Member, message: m.FromWorker, fds: list[int]) -> None:
        member.asks = not isinstance(message, m.UNANSWERED)
        match message:
            case m.Push() if self.halted is None:  # most of all messages
                self._push(member, message)
            case m.Leave():
                self.report(member, message.values)
                self._waiting += [member] if message.waits else []
                self._gathering.told(member, message.state, self._run)
                if self._run is not None and message.passes is not None:
                    self._run.ledger.passes[member.rank] = message.passes
                self._gone(member, "stopped" if self.ending else "finished", "")
            case m.Failed():
                self._script_failed(member, message)
            case m.Say():
                self.note(message.level, message.text)
            case m.PlanEpochs():
                self._planned_epochs = message.epochs
                if self._run is not None:
                    self._run.ledger.plan(message.epochs)
                    self._work.planned_epochs = message.epochs
                before = 0 if self._run is None else self._run.ledger.samples_before
                self.trace.write(events.Planned(self.now(), message.epochs, before))
            case m.Enough():
                self._started.ledger.end_work(member.rank, self.now(), message.why)
                self._work.answer()
            case m.Restore():  # once the run is over, its last push may not have been taken
                self._gathering.restore(None if self.halted else self._run, member, message, fds, self.note)
            case _ if self.halted is not None:
                self.send(member, self.halted)
            case m.RecallOptimizer():
                recall(self._started, member, message, self.send)
            case m.BarrierPassed():
                looks = message.looks, message.asked
                self._follow(self._started.ledger.passed(member.rank, self.now(), *looks))
                self._work.answer()
            case m.Meet():
                self.family.meet(member, message, fds)
                self._work.answer()
                if message.push is not None:
                    self.leading.pushed(member, message.push, self._started)
            case m.Draw() | m.Linger():
                self._work.ask(member, message)
            case m.Give():
                self._exchanging.give(member, message)
            case m.Away():
                self.family.away(member, message)
            case m.Back():
                self.evaluating.back(member, message, self.family.distance)
            case m.Hello():
                if self._run is None:
                    self._gathering.hello(member, message)
                self.send(member, m.Welcome(self.config, member.rank, self.leading.welcomes(member.rank)))
            case m.Register():
                self._gathering.register(member, message, fds)
                if self._run is None:
                    self._maybe_begin()
                else:
                    self._join_late(member, self._run)

    def _maybe_begin(self) -> None:
        here = self._run is None and self.halted is None and len(self.members) == self.config.workers
        if here and self._gathering.complete(self.living, self.send):
            self._begin()

    def _join_late(self, member: Member, run: Run) -> None:
        """Somebody came, or came back, while the run goes on; if it does not fit, only it is turned away."""
        try:
            self._gathering.equip_late(member, run, self.living)
        except PacelineError as error:
            self.send(member, m.Halt("config", str(error)))
            member.gone = True
            member.channel.close()
            return
        self._enlist([member])

    def _begin(self) -> None:
        members = self.living
        run = assemble(self._gathering, self.config, members, self.trace.write, self._simulated)
        self._run = run
        self.family = self._family(run)
        self._gathering.hand_state(run, members)
        self._gathering.tell(self.note)
        run.ledger.plan(self._planned_epochs)
        self._zero_s = self._clock()
        self.keeping.begin(run.ledger.pacer.clocks.version)
        self._enlist(members)

    def _family(self, run: Run) -> Family:
        if isinstance(run, PeerRun):
            return self._meeting(run, self)
        return PacedFamily(
            self, lambda: self._started, self._carry_out, lambda member: self.evaluating.away(member)
        )

    def _enlist(self, members: list[Member]) -> None:
        """They have their memory: now they count, and begin."""
        run = self._started
        for member in members:
            joined = run.ledger.join(member.rank, self.now(), None if self._simulated else member.pid)
            if len(members) == 1:
                self._follow(joined)
        for member in members:
            if run.clocks is not None:
                run.clocks.share(member.channel)
            batch, lead = self._work.draw(member), self.leading.tells(member, run)
            self.send(member, ready(run, self.keeping, member, batch, lead), run.fds(member))
            self.on_release(member.rank)
        self.trace.flush()

    def timer(self) -> None:
        """The time the protocol asked for has come."""
        if self._run is not None and not self.after_steps.busy:
            self._follow(self._run.ledger.timer(self.now()))
            self.after_steps.catch_up()

    def _push(self, member: Member, push: m.Push) -> None:
        self.family.push(member, push)
        self._work.answer()
        self.leading.pushed(member, push, self._started)

    def _carry_out(self, decision: Decision) -> float:
        """Do what the protocol has decided; returns how much the step counted."""
        return self.family.carry_out(decision)

    def draw(self, member: Member) -> Batch | None:
        """The member's next batch, if there is one."""
        return self._work.draw(member)

    def show_weights(self, memory: Segment) -> None:
        """Let a sleeping worker see the store's weights, all of them."""
        self._started.store.copy_weights(memory.bytes)

    def take_weights(self, memory: Segment) -> None:
        """What it has made of them takes their place."""
        self._started.store.take_weights(memory.bytes)

    # -- reports, endings, small things -------------------------------------------------------

    def report(self, member: Member, values: dict[str, float] | None) -> None:
        """Put on record what a script reported."""
        if values and self._run is not None:
            clock = self._run.ledger.pacer.clocks.completed.get(member.rank, 0)
            self.trace.write(events.Reported(self.now(), member.rank, clock, values))

    def _script_failed(self, member: Member, message: m.Failed) -> None:
        if message.kind != "error":
            self.halt("config" if message.kind == "config" else "failed", message.text)
        self._gone(member, "stopped" if self.ending else "failed", message.text)

    def _gone(self, member: Member, reason: str, detail: str) -> None:
        member.gone = True
        if member not in self._waiting:
            member.channel.close()
        member.lost, member.failed = reason in ("died", "failed"), reason == "failed"
        self.leading.gone(member, reason, self._run)
        if self._run is None:
            if member.lost:
                self._gathering.lost(member, reason, detail)
            self._maybe_begin()
            return
        if reason != "stopped":  # who is stopped may be resumed
            self._run.store.forget(member.rank)
        self._follow(self._run.ledger.leave(member.rank, self.now(), reason, detail))
        if self.halted is None:
            self.family.leave(member)
            self.family.look()
            self._work.answer()
        if member.lost and self.config.on_failure == "stop":
            self.stop("failed", f"rank {member.rank} {reason}: {detail}")

    def _follow(self, decision: Decision | None) -> None:
        if decision is not None and self.halted is None:
            self._carry_out(decision)

    def stop(self, kind: Literal["stopped", "failed"], text: str) -> None:
        """End the run in good order: everybody finishes its iteration and is told instead of released."""
        if self._run is None:
            self.halt(kind, text)
        elif not self.ending:
            self._gathering.reserve.release()  # peers write down where they stand
            self.stopping = m.Halt(kind, text)
            for member in self._run.at_barriers(self.living):
                self.send(member, self.stopping)
            self.patience_s = self.family.stop(kind)

    def halt(self, kind: Literal["config", "stopped", "failed"], text: str) -> None:
        """End the run at once: whoever is asleep is told now, whoever computes with its next message."""
        if self.halted is not None:
            return
        self.halted = m.Halt(kind, text)
        for member in (x for x in self.living if x.asks or self.config.connects):
            self.send(member, self.halted)

    def close(self) -> None:
        """Write what remains of the run, and hand it to those who wait for it."""
        self.halted = self.last_word
        if self.halted is None and self.members and all(member.lost for member in self.members.values()):
            self.halted = m.Halt("failed", "every worker failed")
        self.keeping.tell(wait=True)
        if self._run is None:  # even a run that never began has a trace, so that every reader can say why
            self.halted = self.halted or m.Halt("config", NEVER_PREPARED)
            self.trace.write(run_not_begun(self.config, self._simulated))
            self._gathering.tell_absent(self.trace.write)
        else:
            self._save(self._run)
        if self.halted is not None:
            turn_away(self._waiting, self.halted)
        due = None if self._run is None else self._run.ledger.samples_due
        self.trace.write(run_ended(self.now(), self.halted, due))
        self.trace.close()

    def _save(self, run: Run) -> None:
        leads = self.leading.rank  # who evaluates last: what it found holds with its buffers
        lead = min(self.members.values(), key=lambda each: (each.lost, each.rank != leads, each.rank))
        saved, finished = self.family.conclude(lead), self.halted is None
        kept = not finished or any(member.failed for member in self.members.values())
        told = self.config, run, lead, saved.peers, self._gathering.reserve
        warn = partial(self.note, "warning")
        self.halted = save_run(*told, whole=saved.whole, kept=kept, halted=self.halted, tell=warn)
        if self.halted is None:
            hand_out(run, lead, self._waiting)
        for text in last_remarks(run.ledger, finished):
            self.note("warning", text)
        if self.after_steps.owed:
            self.note(
                "warning",
                "no worker was left to run pace.after_step() after the last step: it is not in the weights",
            )

    def note(self, level: Literal["info", "warning", "error"], text: str) -> None:
        """Something for people to read."""
        self.trace.write(events.Note(self.now(), level, text))

    @property
    def _started(self) -> Run:
        if self._run is None:
            raise RunError(TOO_EARLY)
        return self._run

    @cached_property
    def _work(self) -> BatchDispenser:
        """Who gets which batch; only once training has begun."""
        ledger, living = self._started.ledger, lambda: self.living
        return BatchDispenser(ledger, living, self._grant, self._planned_epochs)

    @property
    def evaluating(self) -> StoreEvaluation:
        """How evaluations go; only once training has begun."""
        return StoreEvaluation(self._started, self.trace, self.now, self._follow, self.send, self._simulated)

    def _grant(self, member: Member, batch: Batch | None) -> None:
        run, ends = self._started, isinstance(member.said, m.Linger)
        lead = ends and self.leading.tells(member, run)
        self.send(member, m.Grant(batch, run.ledger.enough, lead))
        self.on_release(member.rank)

    def send(self, member: Member, message: m.FromStore, fds: tuple[int, ...] = ()) -> None:
        """Answer; if the worker is gone its death is noticed elsewhere."""
        try:  # noqa: SIM105 - three calls of Python more per answer
            member.channel.send(message, fds)
        except OSError:
            pass
        member.asks, member.since_s = False, time.monotonic()
