"""A run with a store in the middle: verdicts are carried out on it, and workers released."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf, isfinite
from typing import ClassVar

from paceline.errors import RunError
from paceline.protocols import Decision
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.apply import VerdictApplier
from paceline.runtime.owner.endings import keep_if_due
from paceline.runtime.owner.release import release
from paceline.runtime.run.family import Concluded
from paceline.runtime.run.member import Member
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.run import Run
from paceline.runtime.run.shared_clocks import SharedClocks
from paceline.store.increments import AddingStore
from paceline.store.optimizers import GroupSettings


def step_rate(settings: list[GroupSettings], cap: float | None) -> float:
    """The longest step of all groups: with momentum it goes on for 1 / (1 - momentum) times as far."""
    limit = inf if cap is None else cap
    steps = [min(x["lr"], limit) / (1 - min(x.get("momentum", 0.0), 0.999)) for x in settings]
    return float(max(steps))


class PacedFamily:
    """One per paced run."""

    meets: ClassVar[bool] = False
    closed: ClassVar[str] = ""
    distance: dict[str, float] | None = None

    def __init__(
        self,
        owner: OwnerView,
        run: Callable[[], Run],
        follow: Callable[[Decision], float],
        evaluate: Callable[[Member], None],
    ) -> None:
        """`run`: asked each time, since a store may be cut into portions after the beginning; `follow`: does
        what was decided, everywhere; `evaluate`: begins the evaluation of a worker."""
        self._owner, self._run, self._follow, self._evaluate = owner, run, follow, evaluate
        self._applier = VerdictApplier(owner.config, run(), owner.members, owner.after_steps)

    def push(self, member: Member, push: m.Push) -> None:
        """A gradient is complete: have it decided on, carry that out, and put it on record."""
        owner, run, began = self._owner, self._run(), time.perf_counter()
        gradients = member.pushed
        gradients.missing = frozenset(push.missing)
        if push.settings or run.ledger.parking is not None:
            self._set(run, member, push)
        member.told(push)
        run.ledger.again += push.again
        run.ledger.withheld += push.withheld
        member.looping, member.wants = True, push.want
        trusted = owner.config.bad_gradient == "stop" or push.finite or push.scaled
        usable = trusted or isfinite(run.store.norm(gradients))
        if push.state is not None:
            run.ledger.told[member.rank] = push.state
        if isinstance(run.store, AddingStore):
            run.store.pushed(member.rank)
        now = owner.now()
        decision = run.ledger.push(member.rank, now, push.samples, push.used, usable=usable)
        scale = self._follow(decision)
        spent = (
            time.perf_counter() - began if owner.virtual is None else owner.virtual.exchange_s(member.rank)
        )
        kept = push.withheld, push.forced
        run.ledger.pushed(decision, now, push.samples, push.compute_s, spent, scale, not usable, kept)
        owner.report(member, push.values)
        if run.clocks is not None and run.at_barriers([member]):
            self._leave_to_itself(member, run.clocks, run.ledger.pacer.clocks.clock(member.rank))

    def _set(self, run: Run, member: Member, push: m.Push) -> None:
        """The settings of its script's optimizer; how long steps are decides who is parked."""
        member.settings = push.settings or member.settings
        if run.ledger.parking is not None:
            run.ledger.parking.rate = step_rate(member.settings, self._owner.config.lr_cap)

    def _leave_to_itself(self, member: Member, clocks: SharedClocks, clock: int) -> None:
        """Its gradient is in the weights, and it keeps a barrier of its own: it tells when it has passed."""
        clocks.note(member.rank, clock)
        self._owner.send(member, self._owner.stopping or m.Added(clock))
        member.asks = True
        self._owner.on_added(member.rank)

    def carry_out(self, decision: Decision) -> float:
        """Gradient, flush, releases: in this order, so that a release contains what caused it."""
        owner, run, again_s = self._owner, self._run(), decision.ask_again_s
        owner.ask_at = None if again_s is None else owner.now() + again_s
        run.store.use_cores(run.idle_cores(owner.cores, len(decision.release)))
        if self._applier.run is not run:
            self._applier = VerdictApplier(owner.config, run, owner.members, owner.after_steps)
        scale = self._applier.carry_out(decision)
        if not owner.ending:
            keep_if_due(owner.keeping, run, owner.members.values())
        for rank in sorted(decision.release):
            run.held.set_aside(rank)
            self._release(run, owner.members[rank])
        return scale

    def _release(self, run: Run, member: Member) -> None:
        """Wake it: fresh weights lie in its memory."""
        owner = self._owner
        if member.gone:
            return
        if owner.stopping is not None:
            owner.send(member, owner.stopping)
            return
        batch = owner.draw(member) if member.wants else None
        lead = owner.leading.tells(member, run)
        owner.send(member, release(run, owner.keeping, member, batch, lead))
        owner.on_release(member.rank)

    def meet(self, member: Member, message: m.Meet, fds: list[int]) -> None:
        """Only peers meet."""
        raise RunError(
            f"rank {member.rank} started an exchange with other workers, but this run has a store."
        )

    def away(self, member: Member, message: m.Away) -> None:
        """On weights that stand still for it."""
        self._evaluate(member)

    def missing(self, rank: int) -> list[int] | None:
        """Nobody meets: the protocol knows who waits."""
        return None

    def look(self) -> None:
        """Nothing is waited for: every push is answered when it comes."""

    def leave(self, member: Member) -> None:
        """The books tell the protocol, which is asked again; nothing else holds on to it."""

    def stop(self, kind: str) -> float:
        """Everybody is told instead of released: at its next push, which may be several batches away."""
        config = self._run().ledger.config
        longest_s = max(member.longest_s for member in self._owner.members.values())
        return 0.0 if config.trigger is None else longest_s * (config.trigger_most - 1)

    def conclude(self, lead: Member) -> Concluded:
        """The store has the model already."""
        return Concluded(None, whole=True)
