"""Everybody is here: lay the run out as its protocol's family needs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.choice import check_fabric, check_hosts
from paceline.fabric.segment import Segment, check_room
from paceline.protocols import Peer
from paceline.protocols.core.peer_books import PeerBooks
from paceline.protocols.rules import increments, slow_parking, triggering
from paceline.protocols.rules.compression import check_family
from paceline.protocols.rules.steady import check_steady
from paceline.protocols.settings import resolved
from paceline.runtime.run.equipment import check_same, equip, one_link, room_needed
from paceline.runtime.run.member import Member
from paceline.runtime.run.resume import resume_peers
from paceline.runtime.run.run import Run
from paceline.runtime.run.start import RunStart
from paceline.store.disk.checksums import unchecked
from paceline.store.disk.folders import partial_of
from paceline.store.layout import Layout
from paceline.store.ledger import Ledger
from paceline.store.optimizers import OptimizerGroup, OptimizerSpec
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.replicas import Replica, answer_bytes
from paceline.store.work.budget import Budget, Source
from paceline.store.work.chunks import CHUNKED, shards_of
from paceline.store.work.dealt import Dealt
from paceline.store.work.recorded import RecordedBudget
from paceline.trace import read_trace
from paceline.trace.events import Event


class PeerRun(Run):
    """A run of peers. Its store holds the mean of all models, when wanted; or the one that all share."""

    def __init__(
        self,
        ledger: Ledger,
        store: ParameterStore,
        weights: Segment,
        protocol: Peer,
        connects: bool,
        shared: bool,
    ) -> None:
        """`connects`: whether workers connect to each other, instead of sharing memory; `shared`: whether
        one model will do for all."""
        super().__init__(ledger, store, weights, shared)
        self.protocol = protocol
        self.meeting = os.memfd_create("paceline-meeting", os.MFD_CLOEXEC) if connects else None
        memory = torch.zeros(store.layout.segment_bytes if shared else 0, dtype=torch.uint8)
        self.total = Gradients(store.layout, memory) if shared else None
        """The mean of all gradients, where one model is stepped for all. Each worker's own stays as it is."""
        size = answer_bytes(store.layout)
        self.common = Segment.create(size, "answers for all")
        self.replicas: dict[int, Replica] = {}
        self._answers: dict[int, Segment] = {}

    def admit(self, member: Member) -> None:
        """Know a worker's memories, and give it one for answers of its own."""
        assert member.segment is not None
        weights = member.weights or self.weights
        layout = self.store.layout
        own = self._answers[member.rank] = Segment.create(
            answer_bytes(layout), f"answers for rank {member.rank}"
        )
        memories: tuple[Tensor, ...] = (weights.bytes, member.segment.bytes, own.bytes)
        self.replicas[member.rank] = Replica(layout, *memories)

    @property
    def agrees(self) -> bool:
        """Whether all workers have the run's own model after every step."""
        return self.shared or self.protocol.agrees

    def fds(self, member: Member) -> tuple[int, ...]:
        """What a peer is given: besides, where to connect, or where answers lie."""
        given = super().fds(member)
        if self.meeting is not None:
            return *given, self.meeting
        return *given, self.common.fd, self._answers[member.rank].fd


def assemble(
    gathering: RunStart,
    config: RunConfig,
    members: list[Member],
    write: Callable[[Event], None],
    simulated: bool,
) -> Run:
    """The run that command and script came to agree on."""
    name, protocol = gathering.protocol
    _check_family(name, isinstance(protocol, Peer), members)
    check_family(config.compress, name, protocol)
    check_fabric(config.fabric, name, protocol, config.compress)
    if not isinstance(protocol, Peer):
        run = gathering.begin(members, write, simulated)
        gathering.tell_absent(write)
        return run
    _check_possible(config, name, simulated)
    triggering.check(gathering.trigger, name, paced=False)
    if config.apply != "optimizer":
        raise increments.no_store(name)
    slow_parking.check(config.park_slow, name, paced=False)
    elsewhere = any(member.far for member in members)
    check_hosts(config.fabric, elsewhere)
    check_steady(config.checkpoint_every, name, protocol)
    if config.checkpoint_every is not None and elsewhere:
        raise ConfigError(
            f"--checkpoint-every {config.checkpoint_every} needs all peers on one host so far, but some are "
            "on others. Leave it out, or use a paced protocol."
        )
    if config.compress != "none" and elsewhere:
        gathering.remarks.append(
            f"--compress {config.compress}: vectors travel compressed to the host where peers meet; "
            "an average comes back compressed or whole, whichever is less"
        )
    if protocol.apart and config.connects:
        gathering.remarks.append(
            f"over {config.fabric} all who are connected in the topology wait for each other, and nothing is "
            "mixed beside computing; over --fabric shared workers wait for their neighbours only"
        )
    protocol.check(config.workers)
    gathering.remarks += [*_ignored(config, name, protocol), *unchecked(config.resume)]
    gathering.remarks += one_link(name, config, members) if name == "allreduce" else []
    gathering.warnings += protocol.remarks(config.workers)
    _check_complete(config, members)
    run = _assemble_peers(gathering, config, name, protocol, members, write, simulated)
    if (lead := members[0].registered) is not None:
        replicas = 0 if run.shared else len(members)
        gathering.warnings += gathering.reserve.take(room_needed(lead.layout, lead.optimizer, replicas))
    return run


def saved_peers(config: RunConfig) -> int | None:
    """How many workers have saved their state; None, and nothing is left of it, unless all have."""
    folder, workers = partial_of(config.path / "checkpoint"), config.workers
    if all((folder / f"rank{rank}.json").is_file() for rank in range(workers)):
        return workers
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _check_family(name: str, peers: bool, members: list[Member]) -> None:
    """Refuse workers whose scripts took them for another family's: peers keep their optimizers."""
    for member in members:
        if member.registered is not None and member.registered.peer != peers:
            raise ConfigError(
                f"rank {member.rank} does not run protocol {name!r} as the others do. "
                "Name it in join(...) on every worker, or with --protocol."
            )


def _ignored(config: RunConfig, name: str, protocol: Peer) -> list[str]:
    """Flags that mean nothing to peers, in words."""
    flags = {
        "--weighting": config.weighting != "mean",
        "--damping": config.damping != "none",
        "--drop-staler": config.drop_staler is not None,
        "--lr-cap": config.lr_cap is not None,
        "--correct": config.correct not in ("auto", "none"),
        "--private-weights": config.private_weights and not protocol.in_unison,
    }
    return [
        f"{flag} is ignored: under {name!r} every worker steps by itself" for flag, on in flags.items() if on
    ]


def _check_possible(config: RunConfig, name: str, simulated: bool) -> None:
    for asked, what, instead in (
        (simulated and config.connects, f"simulated over {config.fabric!r}", "Leave --fabric out."),
        (
            config.replay is not None and config.connects,
            f"replayed over {config.fabric!r}",
            "What workers do among themselves is not on record; most protocols repeat with the same seed.",
        ),
        (config.balance, "balanced", "Leave --balance out."),
        (bool(config.park), "begun with parked workers", "Leave --park out, or use a protocol with a store."),
    ):
        if asked:
            raise ConfigError(
                f"protocol {name!r} is of the peer family, whose runs cannot be {what} yet. {instead}"
            )


def _check_complete(config: RunConfig, members: list[Member]) -> None:
    absent = set(range(config.workers)).difference(member.rank for member in members)
    if config.connects and absent:
        raise ConfigError(
            f"rank {min(absent)} ended before training began, but fabric {config.fabric!r} connects all. "
            "Let all of them call pace.prepare, or use --fabric shared."
        )


def _assemble_peers(
    gathering: RunStart,
    config: RunConfig,
    name: str,
    protocol: Peer,
    members: list[Member],
    write: Callable[[Event], None],
    simulated: bool,
) -> PeerRun:
    lead = members[0]
    assert lead.registered is not None, "a run begins with workers that have registered"
    initial = gathering.take_initial()
    check_same(lead, members)
    layout = lead.registered.layout
    _check_memory(layout, len(members), 0 if config.connects else protocol.copies)
    shared = all(each.registered and each.registered.optimizer.groups and not each.far for each in members)
    optimizer = lead.registered.optimizer if shared else _no_optimizer(layout)
    weights = Segment.create(layout.weights_bytes, "the model" if shared else "the mean of all models")
    weights.bytes.copy_(initial.bytes[: layout.weights_bytes])
    store = ParameterStore(layout, optimizer, weights.bytes, fast=shared)
    opening: list[Event] = []
    settings = resolved(protocol)
    ledger = Ledger(config, name, PeerBooks(), opening.append, simulated=simulated, settings=settings)
    ledger.budget = _work(lead.registered.source, config, members, protocol)
    resume_peers(config.resume, store, ledger, len(members), shared)
    run = PeerRun(ledger, store, weights, protocol, config.connects, shared)
    for member in members:
        equip(member, store, initial, shared, {})
        run.admit(member)
    if shared:
        weights.seal_for_readers()
    ledger.model(sum(v.numel() for v in store.views), layout.weights_bytes, layout.gradient_bytes)
    ledger.write = write
    for event in opening:
        write(event)
    gathering.tell_absent(write)
    return run


def _work(source: Source | None, config: RunConfig, members: list[Member], protocol: Peer) -> Budget | None:
    if source is None:
        return None
    workers = config.workers
    if config.replay is not None:
        return RecordedBudget(source, workers, read_trace(Path(config.replay)))
    in_turn, level = not protocol.free and config.shards not in CHUNKED, protocol.level
    budget = Dealt(source, workers, level) if in_turn else shards_of(source, config, level)
    for absent in set(range(workers)).difference(member.rank for member in members):
        budget.give_back(absent)
    return budget


def _no_optimizer(layout: Layout) -> OptimizerSpec:
    """Peers step by themselves."""
    return OptimizerSpec("SGD", (OptimizerGroup(tuple(range(len(layout.trained))), {"lr": 0.0}),))


def _check_memory(layout: Layout, workers: int, copies: int) -> None:
    """`copies`: what each worker keeps of its own model; over a fabric that connects all, nobody does."""
    each = layout.segment_bytes + (2 + copies) * layout.weights_bytes
    kept = f", each with up to {copies} copies of its model" if copies else ""
    check_room(2 * layout.weights_bytes + workers * each, f"the memory of {workers} peers{kept}")
