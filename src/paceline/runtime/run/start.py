"""Before the first iteration: who is there, which protocol, which model, whose memory.

Workers say hello and register their models. When all have, the memory of the run is laid out from
rank 0's initial values, and everybody gets its descriptors at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import structs

from paceline.config import RunConfig
from paceline.corrections import AUTO, parse_correction
from paceline.errors import ConfigError, WorkerFailed
from paceline.fabric.segment import Segment, check_room
from paceline.protocols import Pacing, Peer, own
from paceline.protocols.paced.psp_distributed import own_barrier
from paceline.protocols.rules import dropping, increments, slow_parking, triggering
from paceline.protocols.settings import make, make_any
from paceline.runtime.checkpoints.optimizer_state import State, unpacked
from paceline.runtime.checkpoints.worker_state import WorkerState
from paceline.runtime.messages import workers as m
from paceline.runtime.run.equipment import (
    check_same,
    equip,
    memory_needed,
    one_link,
    room_needed,
)
from paceline.runtime.run.member import Member
from paceline.runtime.run.resume import momentum_lost, resume
from paceline.runtime.run.run import Run
from paceline.runtime.run.shared_clocks import SharedClocks
from paceline.store.corrections.choice import Choice, choose, nothing_stale
from paceline.store.corrections.correction import memory_bytes
from paceline.store.corrections.script_state import load
from paceline.store.disk.checksums import unchecked
from paceline.store.disk.reserve import Reserve
from paceline.store.increments import AddingStore
from paceline.store.layout import Layout
from paceline.store.ledger import Ledger
from paceline.store.optimizers import OptimizerSpec
from paceline.store.parameters import ParameterStore
from paceline.store.spread.portions import Portion
from paceline.trace.events import Event, WorkerLeft

PARKED = "parked: it takes no part"


class RunStart:
    """Collects workers until the run can begin."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._name = config.protocol
        self._settings: dict[str, Any] = dict(config.settings)
        self._elsewhere: str | None = None
        """The protocol of a file that a script on another host names."""
        self._files = [(config.protocol_sha256, "when the run was started")]
        """Of a protocol of the user's own: the SHA-256 of its file, as others have it."""
        self.portion: Portion | None = None
        """What of the store will lie here, if other hosts hold the rest."""
        self._correct: str | None = None
        """What scripts say about stale gradients."""
        self._trigger = config.trigger
        """From which share of the usual norm on gradients are pushed, as command or scripts say."""
        self._remembered: State | None = None
        """What a script's optimizer remembered when it was prepared."""
        self.reserve = Reserve(config.path)
        """Room for the end of the run."""
        self.warnings: list[str] = []
        self.remarks: list[str] = []
        """What people should be told once there is a trace to write it to."""
        self.absent: list[WorkerLeft] = []
        """Who was lost before training began; the others go on without it."""
        self._initial: Segment | None = None
        self._there: list[Member] = []
        """Who has begun, and may be gone again."""

    @property
    def protocol(self) -> tuple[str, Pacing | Peer]:
        """The protocol as command and script came to agree on it."""
        name = self._agreed()
        protocol = make_any(name, self._settings)
        for sha256, where in self._files:
            own.check_same_file(name, sha256, where)
        return name, protocol

    def _agreed(self) -> str:
        """Its name. A file that only other hosts name is not loaded: they say so over a network."""
        if self._elsewhere not in (None, self._name):
            raise ConfigError(
                f"protocol {self._elsewhere!r} is named by a script on another host, and code is never "
                "loaded because another host says so. Name it on the command line: --protocol "
                f"{self._elsewhere}"
            )
        return self._name or "bsp"

    def tell(self, note: Callable[[Literal["info", "warning", "error"], str], None]) -> None:
        """Say what people should be told."""
        for text in self.remarks:
            note("info", text)
        for text in self.warnings:
            note("warning", text)

    def hello(self, member: Member, message: m.Hello) -> None:
        """A script named a protocol, or none; the command's word wins."""
        self._hear_correction(message.correct)
        self._trigger = triggering.heard(self._trigger, message.trigger, self._config.trigger is not None)
        asked, ordered = message.protocol, self._config.protocol
        if asked is not None and ordered is None and member.far and own.names_a_file(asked):
            self._elsewhere = asked
            self._files.append((message.sha256, f"where rank {member.rank} is"))
            return
        if asked is not None and ordered is None:
            if self._name not in (None, asked):
                raise ConfigError(
                    f"workers name different protocols, {self._name!r} and {asked!r}. Name one."
                )
            self._name, self._settings = asked, message.settings | self._config.settings
        elif asked is not None and asked == ordered:
            self._settings = message.settings | self._config.settings
        elif asked is not None and member.rank == 0:
            self.remarks.append(f"the script names protocol {asked!r}; the command's {ordered!r} wins")
        if asked is not None and asked == self._name:
            self._files.append((message.sha256, f"where rank {member.rank} is"))
        _ = self.protocol

    def _hear_correction(self, named: str | None) -> None:
        if named is None:
            return
        parse_correction(named)
        if self._correct not in (None, named):
            raise ConfigError(
                f"workers name different corrections, {self._correct!r} and {named!r}. Name one."
            )
        if self._correct is None and self._config.correct not in (AUTO, named):
            ordered = self._config.correct
            self.remarks.append(f"the script names correction {named!r}; the command's {ordered!r} wins")
        self._correct = named

    def correction(self, lead: Member) -> Choice:
        """What is done about stale gradients: the command's word wins, unless it is `auto`."""
        name, protocol = self.protocol
        assert lead.registered is not None
        assert not isinstance(protocol, Peer)
        ordered = self._config.correct
        asked = self._correct if ordered == AUTO and self._correct is not None else ordered
        if self._config.apply == "increments":
            return nothing_stale(asked)
        return choose(asked, name, protocol.lockstep, lead.registered.optimizer, lead.registered.layout)

    def register(self, member: Member, message: m.Register, fds: list[int]) -> None:
        """A worker described its model."""
        member.registered = message
        member.settings = [group.settings for group in message.optimizer.groups]
        if fds:
            layout = message.layout
            self._initial = Segment(fds[0], layout.weights_bytes + layout.segment_bytes)
            self._initial.close_fd()

    def lost(self, member: Member, reason: str, detail: str) -> None:
        """A worker was lost before training began: note it, or end the run if it cannot or may not go on."""
        if member.rank in self._config.park:
            self.absent.append(WorkerLeft(0.0, member.rank, "finished", PARKED))
            return
        config, told = self._config, f"rank {member.rank} {reason} before training began: {detail}"
        if config.connects:
            raise WorkerFailed(
                f"{told.rstrip('.')}. Over {config.fabric} the others cannot continue without it."
            )
        if config.on_failure == "stop" or config.cluster is not None or config.replay is not None:
            raise WorkerFailed(told)
        self.note_absent(member.rank, reason, detail)

    def note_absent(self, rank: int, reason: str, detail: str) -> None:
        """The run begins without it."""
        self.absent.append(WorkerLeft(0.0, rank, reason, f"{detail} (before training began)"))  # type: ignore[arg-type]

    def tell_absent(self, write: Callable[[Event], None]) -> None:
        """Put them on record."""
        for event in self.absent:
            write(event)

    def complete(self, living: list[Member], send: Callable[[Member, m.FromStore], None]) -> bool:
        """Whether all who are left have registered, and what they need is here. If rank 0 was lost with its
        initial values, somebody else is asked for its own."""
        if not living or not all(each.registered for each in living):
            return False
        if self._initial is None and any(left.worker == 0 for left in self.absent) and living[0].asks:
            send(living[0], m.Lend())
            return False
        return self._initial is not None or not any(left.worker == 0 for left in self.absent)

    def take_initial(self) -> Segment:
        """The values that training begins with; they are not kept."""
        if self._initial is None:
            raise ConfigError("rank 0 ended before training began, and its initial weights with it.")
        initial, self._initial = self._initial, None
        return initial

    def told(self, member: Member, state: WorkerState | None, run: Run | None) -> None:
        """A worker has told where it stands, for a checkpoint."""
        if state is not None and run is not None:
            run.ledger.told[member.rank] = state

    def begin(self, members: list[Member], write: Callable[[Event], None], simulated: bool) -> Run:
        """Everybody is here: check, lay out, equip."""
        lead = members[0]
        assert lead.registered is not None, "a run begins with workers that have registered"
        initial = self.take_initial()
        layout = lead.registered.layout
        check_same(lead, members)
        name, _ = self.protocol
        protocol = make(name, self._settings)
        triggering.check(self._trigger, name, paced=True, lockstep=protocol.lockstep)
        slow_parking.check(self._config.park_slow, name, paced=True)
        if self._config.apply == "increments":
            increments.check_rule(name, protocol.lockstep, own.names_a_file(name), self._trigger)
        after_step = lead.registered.after_step
        shared = protocol.lockstep and not self._config.private_weights and not after_step
        correct, remark = self.correction(lead)
        spec = lead.registered.optimizer
        needed = memory_needed(layout, members, shared, self.portion)
        needed += memory_bytes(layout, spec, correct, len(members))
        check_room(needed, f"the store for {len(members)} workers")
        weights = Segment.create(layout.weights_bytes, "weights")
        weights.bytes.copy_(initial.bytes[: layout.weights_bytes])
        store = self._made(layout, spec, weights)
        store.correct(correct)
        if self._config.clip_norm is not None:
            store.norm_by_parameter()
        opening: list[Event] = []
        config = structs.replace(self._config, correct=correct, trigger=self._trigger)
        ledger = Ledger(config, name, protocol, opening.append, simulated=simulated)
        clocks = None if own_barrier(protocol, 0) is None else SharedClocks(self._config.workers)
        if clocks is not None:
            ledger.on_member = clocks.note
        ledger.offer(lead.registered.source, {member.rank for member in members})
        buffers, was = resume(self._config.resume, store, ledger)
        self.remarks += unchecked(self._config.resume)
        staler = dropping.told(self._config.drop_staler, name, protocol.lockstep)
        self.remarks += [text for text in (remark, momentum_lost(was, correct), staler) if text]
        self.remarks += triggering.told(self._trigger, self._config.trigger_most)
        self.remarks += one_link(name, self._config, members)
        if self._config.lr_cap is not None:
            self.remarks.append(f"learning rates above {self._config.lr_cap:g} are cut to it (--lr-cap)")
        for worker in set(store.corrections.workers if store.corrections is not None else ()):
            if worker not in {member.rank for member in members}:
                store.forget(worker)
        self.warnings += self.reserve.take(room_needed(layout, spec, states=_states(store, len(members))))
        self._tell_increments(store, members)
        for member in members:
            equip(member, store, initial, shared, buffers, self.portion)
        ledger.model(sum(v.numel() for v in store.views), layout.weights_bytes, layout.gradient_bytes)
        if shared:
            weights.seal_for_readers()
        ledger.write = write
        for event in opening:  # not before all has gone well: a run that never begins writes its own
            write(event)
        run = Run(ledger, store, weights, shared, clocks)
        run.after_step = after_step
        return run

    @property
    def trigger(self) -> float | None:
        """From which share of the usual norm on gradients are pushed; None: all are."""
        return self._trigger

    def _made(self, layout: Layout, spec: OptimizerSpec, weights: Segment) -> ParameterStore:
        """The store: one that steps, or one that adds."""
        if self._config.apply == "increments":
            return AddingStore(layout, weights.bytes, spec.name)
        return ParameterStore(layout, spec, weights.bytes)

    def _tell_increments(self, store: ParameterStore, members: list[Member]) -> None:
        if isinstance(store, AddingStore):
            config = self._config
            self.remarks += increments.told(config.weighting, far=config.listen is not None)
            empty = [member.rank for member in members if member.rank not in store.found]
            self.warnings += increments.told_empty(empty, resumed=config.resume is not None)

    def restore(
        self,
        run: Run | None,
        member: Member,
        message: m.Restore,
        fds: list[int],
        note: Callable[[Any, str], None],
    ) -> None:
        """A script loads what its optimizer remembered; before the run begins, that is kept for then. Or a
        worker hands in what its own one remembers, for a checkpoint."""
        state = unpacked(message.slots, fds[0]), message.values
        if message.own:
            if run is not None and isinstance(run.store, AddingStore):
                run.store.tell(member.rank, state, message.ahead)
            return
        if run is None:
            self._remembered = state
            return
        steps = run.ledger.pacer.clocks.version
        if steps and not run.agrees:
            note("warning", f"optimizer.load_state_dict() takes effect after {steps} updates of others")
        load(run.store, state, [each.rank for each in self._there if not each.gone])

    def hand_state(self, run: Run, members: list[Member]) -> None:
        """Let the run's optimizer remember what a script has loaded; a resumed one has its own memories."""
        self._there = list(members)
        if self._remembered is not None and self._config.resume is None:
            load(run.store, self._remembered, [member.rank for member in members])
        self._remembered = None

    def equip_late(self, member: Member, run: Run, living: list[Member]) -> None:
        """A worker came, or came back, while the run goes on: give it what the others have."""
        others = [x for x in living if x.segment is not None]
        if not others or isinstance(self.protocol[1], Peer):
            raise ConfigError(f"rank {member.rank} cannot join now, because no other worker is left.")
        first = others[0]
        assert first.segment is not None
        check_same(first, [first, member])
        values = run.store.layout.buffer_views(first.segment.bytes)
        buffers = {slot.name: view for slot, view in zip(run.store.layout.buffers, values, strict=True)}
        equip(member, run.store, None, run.shared, buffers, self.portion)
        self._there.append(member)
        self._initial = None


def _states(store: ParameterStore, workers: int) -> int:
    """How many optimizers' states a checkpoint has."""
    return workers if isinstance(store, AddingStore) else 1
