"""What peers get when they meet: the sums and mixtures of the vectors that they brought."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite

from paceline.protocols.core.meeting import Gathered
from paceline.runtime.hosts.remote_peer import RemotePeer
from paceline.runtime.hosts.remote_worker import RemoteWorker
from paceline.runtime.meeting.packed import PackedVectors
from paceline.runtime.messages import workers as m
from paceline.runtime.run.held_gradients import HeldGradient
from paceline.runtime.run.member import Member, bad_gradient, smallest, stops
from paceline.runtime.run.owner_view import OwnerView
from paceline.runtime.run.peer_start import PeerRun
from paceline.store.cells import Cells
from paceline.store.cutting import cut_of
from paceline.store.parameters import Gradients
from paceline.store.replicas import (
    BUFFERS,
    GRADIENTS,
    PARAMETERS,
    Parts,
    Replica,
    Summing,
    answer_parts,
    in_equal_shares,
    is_buffers,
    parameter_parts,
)


class JointSums:
    """One per run of peers: reads what sleeping workers brought, and writes what they are to find."""

    def __init__(self, run: PeerRun, owner: OwnerView) -> None:
        self._run, self._owner, self._members = run, owner, owner.members
        self._layout = run.store.layout
        self._summing = Summing(fused=owner.config.compress == "none")
        self.packages = PackedVectors(self._layout, owner.config.compress)
        """Compressed vectors, of workers on other hosts."""
        self._cut = cut_of(self._layout)
        self._common = answer_parts(self._layout, run.common.bytes)
        self.cells = Cells(parameter_parts(self._layout, run.store.weights))
        """What workers exchange with one by one."""
        self._count = 0

    def average(self, gathered: Gathered) -> dict[int, m.Met]:
        """One sum for all, in the memory all read if all are there to be answered, else in each one's own."""
        if self._run.total is not None:
            return self._step(gathered, self._run.total)
        turn, row = gathered.turn, gathered.rows[gathered.receivers[0]]
        replicas = [self._run.replicas[rank] for rank in row]
        like = replicas[0].brought(turn).place
        shared = gathered.lane <= 0 and {member.rank for member in self._owner.living} == set(
            gathered.receivers
        )
        into: list[Parts] = [self._common[is_buffers(like)]]
        if not shared:
            into = [self._run.replicas[rank].answer(turn) for rank in gathered.receivers]
        self._summing.use_cores(self._idle_cores, gathered.size_bytes)
        shares, part = zip(replicas, row.values(), strict=True), gathered.part
        summands = [(self._cut.pieces(each.vector(turn), part), share) for each, share in shares]
        norm = self._summing.add_up(summands, [self._cut.pieces(each, part) for each in into])
        if not isfinite(norm) and like == GRADIENTS and stops(self._owner.config, self._members, row):
            raise bad_gradient([self._pushed(rank) for rank in row], self._layout)
        missing = frozenset.intersection(*(replica.brought(turn).missing for replica in replicas))
        self._count += 1
        self.packages.used(gathered, self._count, far_peers(self._members, gathered.receivers))
        met = m.Met(None, shared, self._count, norm, tuple(sorted(missing)))
        return dict.fromkeys(gathered.receivers, met)

    def _step(self, gathered: Gathered, total: Gradients) -> dict[int, m.Met]:
        """All have one model: average, and step in everybody's place."""
        row, store = gathered.rows[gathered.receivers[0]], self._run.store
        store.use_cores(self._idle_cores)
        parts = []
        for rank, share in row.items():
            brought, pushed = self._run.replicas[rank].brought(gathered.turn), self._members[rank].pushed
            pushed.missing = brought.missing
            parts.append((pushed, share))
        lead = self._members[min(row)]
        total, norm = store.reduce(parts, None if lead.spent else total)
        if isfinite(norm):
            clip = smallest(self._owner.config.clip_norm, lead.clip)
            store.apply(total, lead.settings, 1.0, norm, clip)
        elif stops(self._owner.config, self._members, row):
            raise bad_gradient([self._pushed(rank) for rank in row], self._layout)
        return dict.fromkeys(gathered.receivers, m.Met(shared=True, norm=norm))

    def _pushed(self, rank: int) -> HeldGradient:
        return HeldGradient(rank, self._members[rank].pushed, 1.0, self._members[rank].samples)

    def mix(self, gathered: Gathered) -> dict[int, m.Met]:
        """A mixture for each."""
        self._summing.use_cores(self._idle_cores, gathered.size_bytes)
        self.packages.used(gathered)
        replicas, turn = self._run.replicas, gathered.turn
        for rank in gathered.receivers:
            parts = [(replicas[peer].vector(turn), share) for peer, share in gathered.rows[rank].items()]
            self._summing.add_up(parts, [replicas[rank].answer(turn)])
        return {rank: m.Met() for rank in gathered.receivers}

    def trade(self, rank: int, message: m.Meet, there: Collection[int]) -> tuple[int, int]:
        """Exchange with a cell; the bytes there and back. `there`: whose cells are left, besides its own."""
        trade, replica = message.trade, self._run.replicas[rank]
        assert trade is not None
        vector = replica.parts(message.place)
        into = replica.parts(message.into) if trade.lane else replica.answer_like(message.place)
        other = trade.other if trade.other in there else None
        self.cells.exchange(trade.rule, trade.cell, other, trade.rate, vector, into)
        return trade.rule.travels(sum(part.numel() * part.element_size() for part in vector))

    def mean(
        self,
        stayed: Mapping[int, Replica],
        counted: Sequence[int],
        into: tuple[Parts, Parts],
        stage: int | None = None,
    ) -> float:
        """The mean of those that count, parameters and buffers; how far all who stayed are from it.

        `stage`: as they were after so many iterations."""
        here = {rank: (each.parts(PARAMETERS), each.parts(BUFFERS)) for rank, each in stayed.items()}
        models = {rank: each.standing for rank, each in stayed.items()}
        if stage is not None:
            here = {rank: each.at(stage) for rank, each in stayed.items()}
            models = {rank: parameters for rank, (parameters, _) in here.items()}
        self._summing.add_up(in_equal_shares([models[rank] for rank in sorted(counted)]), [into[0]])
        self._summing.add_up(in_equal_shares([here[rank][1] for rank in sorted(counted)]), [into[1]])
        return self._summing.spread([parameters for parameters, _ in here.values()], into[0])

    @property
    def _idle_cores(self) -> int:
        """Cores on which no worker computes."""
        return self._owner.cores - sum(not (each.asks or each.far) for each in self._owner.living)


def far_peers(members: Mapping[int, Member], ranks: Iterable[int]) -> list[RemotePeer]:
    """The way to those of them who are on other hosts."""
    lines = [members[rank].channel for rank in sorted(ranks)]
    return [line.known_peer for line in lines if isinstance(line, RemoteWorker)]
