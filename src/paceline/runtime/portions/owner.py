"""The owner of a run whose store lies on several hosts: it decides, and all holders carry out.

It holds the first portion itself, in the way every owner holds its store; what it does there it orders
the holders to do. A push counts when all of its pieces have arrived, wherever they belong: so whether a
gradient is finite is known before anything is decided, and a worker lost halfway was never there.
A worker goes on when every holder has sent it what the same orders made of its portion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
from safetensors import SafetensorError

from paceline.config import RunConfig
from paceline.errors import BadGradient, ConfigError, RunError
from paceline.fabric.channel import Channel
from paceline.fabric.choice import check_store_hosts
from paceline.fabric.segment import Segment
from paceline.fabric.wire import parse_address
from paceline.protocols import Decision, Peer
from paceline.runtime.hosts.remote_hosts import RemoteHost
from paceline.runtime.hosts.remote_worker import RemoteWorker
from paceline.runtime.messages import workers as m
from paceline.runtime.messages.hosts import SHARED
from paceline.runtime.messages.portions import (
    COORDINATOR,
    Broke,
    Fresh,
    HolderPlace,
    PieceStaged,
    PortionPlan,
    Wake,
)
from paceline.runtime.owner.owner import Owner
from paceline.runtime.portions.orders import Coordinator, Told
from paceline.runtime.portions.snapshot import PortionRun
from paceline.runtime.run.held_gradients import HeldGradients
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.store.disk.folders import saved_in
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.spread.portions import (
    FirstPortion,
    KeepGradient,
    Pushed,
    SumOrder,
    cut,
    of_whole,
    to_whole,
)
from paceline.store.spread.slices import Slices, slice_evenly, slices_of

Place = tuple[int, int]
"""Host and lane of a worker."""


class PortionHeldGradients(HeldGradients):
    """Held gradients of the first portion; what is copied here is copied everywhere."""

    def __init__(self, store: FirstPortion) -> None:
        super().__init__(store.layout)
        self._store = store

    def _copy(self, gradients: Gradients) -> Gradients:
        copy = super()._copy(gradients)
        pushed = self._store.pushed[copy] = self._store.pushed[gradients]
        self._store.done.append(KeepGradient(pushed))
        return copy


class Coming:
    """What is known of a worker's push that is on its way to all holders."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.number = 0
        self.push: m.Push | None = None
        self.lost: str | None = None
        """What happened to the worker meanwhile."""


class PortionOwner(Owner):
    """Carries out one run, its store on several hosts."""

    def __init__(self, config: RunConfig, now: Callable[[], float], coordinator: Coordinator) -> None:
        super().__init__(config, now)
        self._coordinator = coordinator
        self._plan_: PortionPlan | None = None
        self._slices: Slices | None = None
        self._store: FirstPortion | None = None
        self._parted: PortionRun | None = None
        self._places: dict[Member, Place] = {}
        self._coming: dict[Place, Coming] = {}
        self._staged: dict[Place, dict[int, PieceStaged]] = {}
        self._wakes: list[Wake] = []
        self._deciding = False
        self._whole = False

    def fileno(self) -> int:
        """Readable when `turn` has something to do."""
        return self._coordinator.fileno()

    def turn(self) -> None:
        """Hear the holders."""
        for told in self._coordinator.take():
            if self.after_steps.busy and isinstance(told.message, PieceStaged):
                self.after_steps.put_off(partial(self._heard, told))
            else:
                self._heard(told)

    def _heard(self, told: Told) -> None:
        match told.message:
            case Fresh():
                self._coordinator.mesh.gate.arrived(told.lane, told.holder)
            case PieceStaged():
                place = told.message.host, told.message.lane
                self._staged.setdefault(place, {})[told.holder] = told.message
                self._look(place)
                self.after_steps.catch_up()
            case Broke():
                self.halt("failed", f"the store is lost: {told.message.text}")

    def host_lost(self, host: RemoteHost, why: str) -> None:
        """A host is given up; if it held a portion, the run is over."""
        plan = self._plan_
        if plan is not None and plan.portion_of(host.number) is not None:
            number = 2 + [holder.number for holder in plan.holders].index(host.number)
            text = (
                f"host {host.name}, which held portion {number} of {len(plan.portions)} of the weights, "
                f"is {why}. They are lost: {self._instead}."
            )
            self._coordinator.give_up(text)
            self.halt("failed", text)

    def while_waiting(self, look: Callable[[], object]) -> None:
        """Have this called while the loop waits for holders: it may find that one is lost."""
        self._coordinator.look = look

    @property
    def _instead(self) -> str:
        if saved_in(self.config.path) is not None:
            return "resume the last checkpoint"
        return "begin anew, or resume the checkpoint that the run began with"

    def conclude(self) -> None:
        """The loop is over: get the weights back, to be saved."""
        self.keeping.tell(wait=True)
        if self._plan_ is not None:
            try:
                self._gather(self._plan_, self._started)
            except (RunError, SafetensorError) as error:
                self.halt("failed", f"the store is lost: {error}")
        self._coordinator.close()

    # -- the beginning ------------------------------------------------------------------------

    def _begin(self) -> None:
        name, protocol = self._gathering.protocol
        check_store_hosts(self.config.store_hosts, name, protocol)
        assert not isinstance(protocol, Peer)
        holders = self._choose_holders()
        registered = self.living[0].registered
        assert registered is not None
        clip, count = self.config.clip_norm, self.config.store_hosts
        model = slice_evenly(registered.layout, registered.optimizer, count, by_chunks=clip is not None)
        portions = cut(model.layout, count)
        shared = protocol.lockstep and not self.config.private_weights and not registered.after_step
        self._gathering.portion = portions[0]
        correct = self._gathering.correction(self.living[0]).name
        self._slices, parts = model, (portions, tuple(holders), clip, correct, model.origins)
        self._plan_ = PortionPlan(COORDINATOR, shared, model.layout, model.optimizer, *parts)
        super()._begin()

    def _choose_holders(self) -> list[HolderPlace]:
        """Those hosts whose workers have the lowest ranks."""
        lines = [member.channel for member in self.living if isinstance(member.channel, RemoteWorker)]
        hosts = list(dict.fromkeys(line.host for line in lines if line.host.reach))
        wanted = self.config.store_hosts - 1
        if len(hosts) < wanted:
            raise ConfigError(
                f"the store is to lie on {wanted + 1} hosts, but the run's workers are on {len(hosts) + 1}. "
                f"Let workers of more hosts take part, or use --store-hosts {len(hosts) + 1}."
            )
        return [HolderPlace(host.number, host.name, parse_address(host.reach)) for host in hosts[:wanted]]

    def _enlist(self, members: list[Member]) -> None:
        if self._store is None:
            self._split(self._started, members)
        for member in members:
            self._introduce(member)
        super()._enlist(members)

    def _split(self, run: Run, members: list[Member]) -> None:
        """Keep the first portion of a store that is whole, and give the others away."""
        plan, slices = self._plan_, self._slices
        assert plan is not None
        assert slices is not None
        whole, first = run.store, plan.portions[0]
        state = slices.of_whole(*whole.export())
        own = FirstPortion(plan.layout, plan.optimizer, first, run.weights.bytes)
        own.correct(plan.correct)
        tensors, values = (of_whole(plan.optimizer, first, part) for part in state)
        own.load(tensors, values)
        own.adjusted = whole.adjusted
        if plan.clip_norm is not None:
            own.norm_by_parameter()
            own.others_add_up = self._others_add_up
        self._store = own
        self._run = self._parted = PortionRun(run, own, plan, slices, self._coordinator.arrived)
        self._run.held = PortionHeldGradients(own)
        for member in members:
            assert member.segment is not None
            member.gradients = Gradients(own.layout, member.segment.bytes)
        self._coordinator.begin(plan, run.weights, state, self._memory)

    def _introduce(self, member: Member) -> None:
        """Know where a worker is, and let its host know who holds what."""
        plan, line = self._plan_, member.channel
        assert plan is not None
        place = COORDINATOR, len(self._places)
        if isinstance(line, RemoteWorker):
            place = line.host.number, line.lane
            line.plan = msgspec.structs.replace(plan, number=line.host.number)
        self._places[member] = place
        self._coming[place] = Coming(member)

    def _memory(self, lane: int) -> Segment:
        """Where weights for a worker of this host belong; called by reading threads."""
        member = None if lane == SHARED else self._coming[COORDINATOR, lane].member
        memory = self._started.weights if member is None else member.weights
        if memory is None:
            raise RunError(f"weights for lane {lane}, which has none of its own.")
        return memory

    # -- one iteration ------------------------------------------------------------------------

    def _push(self, member: Member, push: m.Push) -> None:
        """A worker announces a gradient: its pieces are under way."""
        if member not in self._places:
            raise RunError("a worker pushed before it was ready. Call prepare before training.")
        place = self._places[member]
        coming = self._coming[place]
        member.asks = False  # it sleeps, but what it did is not counted yet
        coming.push, coming.number = push, coming.number + 1
        if isinstance(member.channel, Channel):
            assert member.segment is not None
            memory = memoryview(member.segment.map)
            self._coordinator.mesh.push(place[1], coming.number, memory, push.missing)
        self._look(place)

    def _look(self, place: Place) -> None:
        """Whether a push is complete: then it counts, and not before."""
        coming, staged = self._coming.get(place), self._staged.get(place, {})
        if coming is None or coming.push is None or self.halted is not None:
            return
        strands = self._coordinator.mesh.strands
        here = [staged[x] for x in strands if x in staged and staged[x].number == coming.number]
        if len(here) == len(strands):
            push, coming.push = coming.push, None
            self._guarded(partial(self._complete, coming.member, push, Pushed(*place, coming.number), here))
            if coming.lost is not None:
                self.lost(coming.member, coming.lost)

    def _complete(self, member: Member, push: m.Push, pushed: Pushed, staged: list[PieceStaged]) -> None:
        store = self._store
        assert store is not None
        bad = [each.bad for each in staged if each.bad is not None]
        if bad and self.config.bad_gradient == "stop":
            raise BadGradient(
                f"rank {member.rank} pushed a gradient with NaN or infinity in {bad[0]!r}; nothing was "
                "applied. Lower the learning rate, clip (--clip-norm), or use --bad-gradient skip."
            )
        assert self._plan_ is not None
        push = msgspec.structs.replace(push, missing=slices_of(push.missing, self._plan_.origins))
        member.asks, gradients = True, member.pushed
        store.pushed[gradients] = pushed
        squares = [square for each in staged for square in each.squares]
        store.elsewhere[gradients] = squares if not bad else [math.inf]
        super()._push(member, push)

    def _carry_out(self, decision: Decision) -> float:
        self._deciding = True
        try:
            return super()._carry_out(decision)
        finally:
            self._deciding = False
            self._order()
            self._send_for_portions()

    def _others_add_up(self, wanted: SumOrder) -> Callable[[], list[float]]:
        """Let the holders begin; the loop then waits for them, as it can decide nothing before."""
        assert self._store is not None
        done, self._store.done = self._store.done, []
        self._coordinator.order([*done, wanted])
        return self._coordinator.sums

    def _order(self) -> None:
        """Let the holders do what was done here."""
        store = self._store
        if store is not None and not self._deciding and (store.done or self._wakes):
            self._coordinator.order([*store.done, *self._wakes])
            store.done, self._wakes = [], []

    def show_weights(self, memory: Segment) -> None:
        """The portions of all holders, as they are after what was done here."""
        assert self._store is not None
        done, self._store.done = self._store.done, []
        self._coordinator.order([*done])
        self._coordinator.gather_weights(memory)
        super().show_weights(memory)

    def take_weights(self, memory: Segment) -> None:
        """Here and, before their next order, elsewhere."""
        super().take_weights(memory)
        self._coordinator.spread_weights(memory)

    def _send_for_portions(self) -> None:
        """For a checkpoint that was taken with the last order."""
        run = self._parted
        if run is not None and run.wanted is not None:
            self._coordinator.ask(run.wanted)
            run.wanted = None

    def send(self, member: Member, message: m.FromStore, fds: tuple[int, ...] = ()) -> None:
        """Who is released also gets weights of all holders, and does not go on before."""
        tell = partial(super().send, member, message, fds)
        if self._store is None or not isinstance(message, m.Ready | m.Release):
            tell()
            return
        host, lane = self._places[member]
        version = self._started.ledger.pacer.clocks.version
        self._wakes.append(Wake(host, lane, version, own=member.evaluates))
        self._order()
        if host == COORDINATOR:
            member.asks = False
            self._coordinator.mesh.gate.wait(lane, tell)
        else:
            tell()

    # -- endings ------------------------------------------------------------------------------

    def lost(self, member: Member, detail: str) -> None:
        """A worker died. A push that it announced counts, if its pieces can still arrive."""
        coming = self._coming.get(self._places.get(member, (-1, -1)))
        line = member.channel
        arrives = not (isinstance(line, RemoteWorker) and line.torn) and self.halted is None
        if coming is not None and coming.push is not None and arrives:
            coming.lost = detail
            return
        if coming is not None:
            coming.push = None
        super().lost(member, detail)

    def halt(self, kind: Literal["config", "stopped", "failed"], text: str) -> None:
        """End the run at once; also whoever waits for a holder's weights is told."""
        if self.halted is not None:
            return
        super().halt(kind, text)
        for coming in [x for x in self._coming.values() if x.lost is not None]:
            self.lost(coming.member, coming.lost or "")
        for member in self.living if self._store is not None else ():
            self.send(member, m.Halt(kind, text))

    def _gather(self, plan: PortionPlan, run: Run) -> None:
        """Make the store whole again."""
        own, slices = self._store, self._slices
        if own is None or slices is None:
            return
        parts = [*zip(own.export(), self._coordinator.gather(run.weights), strict=True)]
        whole = ParameterStore(slices.whole, slices.spec, run.weights.bytes)
        whole.correct(plan.correct)
        first = plan.portions[0]
        tensors, values = (to_whole(plan.optimizer, first, mine) | theirs for mine, theirs in parts)
        whole.load(*slices.to_whole(tensors, values))
        whole.adjusted = own.adjusted
        run.store, self._whole = whole, True

    def _save(self, run: Run) -> None:
        if self._whole:
            super()._save(run)
        else:
            self.note("error", "neither weights nor a newer checkpoint could be saved: a portion is lost")
