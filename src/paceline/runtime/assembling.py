"""Everybody is here: lay the run out as its protocol's family needs it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from paceline.config import RunConfig
from paceline.errors import ConfigError
from paceline.fabric.segment import Segment, check_room
from paceline.protocols import Peer
from paceline.protocols.compression import check_family
from paceline.protocols.roll import Roll
from paceline.protocols.settings import resolved
from paceline.runtime.gathering import Assembly, Gathering, check_same, equip
from paceline.runtime.member import Member
from paceline.store.budget import Budget, Source
from paceline.store.dealt import Dealt
from paceline.store.layout import Layout
from paceline.store.ledger import Ledger
from paceline.store.optimizers import Group, OptimizerSpec
from paceline.store.parameters import ParameterStore
from paceline.store.replicas import Replica, answer_bytes
from paceline.trace.events import Event


class PeerAssembly(Assembly):
    """A run of peers. Its store holds no optimizer that matters, only the mean of all models, when wanted."""

    def __init__(self, ledger: Ledger, store: ParameterStore, weights: Segment, protocol: Peer) -> None:
        super().__init__(ledger, store, weights, shared=False)
        self.protocol = protocol
        size = answer_bytes(store.layout)
        self.common = Segment.create(size, "answers for all")
        self.replicas: dict[int, Replica] = {}
        self._answers: dict[int, Segment] = {}

    def admit(self, member: Member) -> None:
        """Know a worker's memories, and give it one for answers of its own."""
        assert member.weights is not None
        assert member.segment is not None
        layout = self.store.layout
        own = self._answers[member.rank] = Segment.create(
            answer_bytes(layout), f"answers for rank {member.rank}"
        )
        memories: tuple[Tensor, ...] = (member.weights.bytes, member.segment.bytes, own.bytes)
        self.replicas[member.rank] = Replica(layout, *memories)

    def further_fds(self, member: Member) -> tuple[int, ...]:
        """What a peer is given beside its segment and weights."""
        return self.common.fd, self._answers[member.rank].fd


def assemble(
    gathering: Gathering,
    config: RunConfig,
    members: list[Member],
    write: Callable[[Event], None],
    simulated: bool,
) -> Assembly:
    """The run that command and script came to agree on."""
    name, protocol = gathering.protocol
    _check_family(name, isinstance(protocol, Peer), members)
    check_family(config.compress, name, protocol)
    if not isinstance(protocol, Peer):
        return gathering.begin(members, write, simulated)
    _check_possible(config, name, simulated)
    protocol.check(config.workers)
    gathering.remarks += _ignored(config, name)
    return _assemble_peers(config, name, protocol, members, write)


def _check_family(name: str, peers: bool, members: list[Member]) -> None:
    """Refuse workers whose scripts took them for another family's: peers keep their optimizers."""
    for member in members:
        if member.registered is not None and (not member.registered.optimizer.groups) != peers:
            raise ConfigError(
                f"rank {member.rank} does not run protocol {name!r} as the others do. "
                "Name it in join(...) on every worker, or with --protocol."
            )


def _ignored(config: RunConfig, name: str) -> list[str]:
    """Flags that mean nothing to peers, in words."""
    flags = {
        "--weighting": config.weighting != "mean",
        "--damping": config.damping != "none",
        "--private-weights": config.private_weights,
    }
    return [
        f"{flag} is ignored: under {name!r} every worker steps by itself" for flag, on in flags.items() if on
    ]


def _check_possible(config: RunConfig, name: str, simulated: bool) -> None:
    for asked, what, instead in (
        (simulated, "simulated exactly", "Run it for real, or simulate a paced protocol."),
        (config.replay is not None, "replayed", "With the same seed it repeats by itself if nobody dies."),
        (config.resume is not None, "resumed", "Begin a new run."),
        (config.balance, "balanced", "Leave --balance out."),
    ):
        if asked:
            raise ConfigError(
                f"protocol {name!r} is of the peer family, whose runs cannot be {what} yet. {instead}"
            )


def _assemble_peers(
    config: RunConfig, name: str, protocol: Peer, members: list[Member], write: Callable[[Event], None]
) -> PeerAssembly:
    lead = members[0]
    if lead.registered is None or lead.initial is None:
        raise ConfigError("rank 0 ended before training began, and its initial weights with it.")
    check_same(lead, members)
    layout, initial = lead.registered.layout, lead.initial
    _check_memory(layout, len(members))
    weights = Segment.create(layout.weights_bytes, "the mean of all models")
    weights.bytes.copy_(initial.bytes[: layout.weights_bytes])
    store = ParameterStore(layout, _no_optimizer(layout), weights.bytes, fast=False)
    opening: list[Event] = []
    ledger = Ledger(config, name, Roll(), opening.append, settings=resolved(protocol))
    ledger.budget = _work(lead.registered.source, config, members, protocol.free)
    run = PeerAssembly(ledger, store, weights, protocol)
    for member in members:
        equip(member, store, initial, False, {})
        run.admit(member)
    ledger.model(sum(v.numel() for v in store.views), layout.weights_bytes, layout.gradient_bytes)
    lead.initial, ledger.write = None, write
    for event in opening:
        write(event)
    return run


def _work(source: Source | None, config: RunConfig, members: list[Member], free: bool) -> Budget | None:
    if source is None:
        return None
    workers = config.workers
    budget = Budget(source, workers, config.shards) if free else Dealt(source, workers)
    for absent in set(range(workers)).difference(member.rank for member in members):
        budget.give_back(absent)
    return budget


def _no_optimizer(layout: Layout) -> OptimizerSpec:
    """Peers step by themselves."""
    return OptimizerSpec("SGD", (Group(tuple(range(len(layout.trained))), {"lr": 0.0}),))


def _check_memory(layout: Layout, workers: int) -> None:
    each = layout.segment_bytes + 2 * layout.weights_bytes
    check_room(2 * layout.weights_bytes + workers * each, f"the memory of {workers} peers")
