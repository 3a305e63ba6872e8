"""A run that can begin, or has begun: its books, its store, its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.fabric.segment import Segment
from paceline.protocols import Pacing, own
from paceline.protocols.core.base import memory
from paceline.protocols.paced.psp_distributed import PeerBarrier, own_barrier
from paceline.protocols.settings import resolved
from paceline.runtime.checkpoints.worker_state import saved
from paceline.runtime.run.held_gradients import HeldGradients
from paceline.runtime.run.member import Member
from paceline.runtime.run.shared_clocks import SharedClocks
from paceline.store.disk.checkpoint import VERSION, RunState, SavedRule, Snapshot, snapshot
from paceline.store.ledger import Ledger
from paceline.store.parameters import ParameterStore


class Run:
    """A run that can begin."""

    def __init__(
        self,
        ledger: Ledger,
        store: ParameterStore,
        weights: Segment,
        shared: bool,
        clocks: SharedClocks | None = None,
    ) -> None:
        """`clocks`: where workers keep barriers of their own, for all to see."""
        self.ledger = ledger
        self.clocks = clocks
        self.store = store
        self.weights = weights
        self.shared = shared
        self.held = HeldGradients(store.layout)
        self.after_step: tuple[int, ...] = ()
        """The optimizers after whose steps scripts have something run on the weights."""

    def snapshot(self, lead: Member, peers: int | None = None) -> Snapshot:
        """What it takes to go on, with the buffers of a worker that sleeps."""
        memory = lead.segment.bytes if lead.segment else None
        return snapshot(self.store, memory, run_state(self.ledger, self.store, peers, self.shared))

    def take(self, lead: Member) -> Callable[[], Snapshot]:
        """The same while the run goes on; where not everything is here, it is complete when called."""
        taken = self.snapshot(lead)
        return lambda: taken

    def fds(self, member: Member) -> tuple[int, ...]:
        """What a worker is given: its segment, its weights, the board if there is one."""
        assert member.segment is not None, "a worker is equipped before it is told"
        given = member.segment.fd, (member.weights or self.weights).fd
        return given if self.clocks is None else (*given, self.clocks.board.fd)

    @property
    def computing(self) -> frozenset[int]:
        """Who does not wait, after all that is decided."""
        clocks = self.ledger.pacer.clocks
        return frozenset(worker for worker in clocks.active if not clocks.is_waiting(worker))

    def barrier(self, rank: int) -> PeerBarrier | None:
        """The barrier a worker keeps itself, if any; in a replay one that asks nobody."""
        barrier = own_barrier(self.ledger.pacer.protocol, rank)
        if barrier is None or self.ledger.config.replay is None:
            return barrier
        return replace(barrier, sample=0)

    def at_barriers(self, living: list[Member]) -> list[Member]:
        """Who waits at a barrier of its own."""
        clocks = self.ledger.pacer.clocks
        return [each for each in living if self.clocks is not None and clocks.is_waiting(each.rank)]

    @property
    def agrees(self) -> bool:
        """Whether all workers have the run's own model after every step."""
        return self.ledger.pacer.protocol.lockstep

    def idle_cores(self, cores: int, released: int) -> int:
        """Cores on which no worker computes: the released ones sleep until they are told."""
        clocks = self.ledger.pacer.clocks
        return cores - (len(clocks.active) - clocks.waiting_count - released)


def run_state(ledger: Ledger, store: ParameterStore, peers: int | None, shared: bool) -> RunState:
    """What a checkpoint keeps besides tensors; `peers`: how many workers have files of their own."""
    return RunState(
        checkpoint=VERSION,
        peers=peers,
        one_model=shared and peers is not None,
        digest=store.layout.digest(),
        version=ledger.pacer.clocks.version,
        samples=ledger.samples,
        units=ledger.units - sum(batch.count for batch in ledger.unapplied),
        pushes=ledger.pacer.clocks.pushes,
        again=ledger.again,
        withheld=ledger.withheld,
        batches=ledger.batches_pushed,
        rule=saved_rule(ledger.pacer.at_rest()) if peers is None else SavedRule(*ledger.named, {}),
        adjusted=store.adjusted,
        budget=ledger.budget.state(ledger.unapplied) if ledger.budget else None,
        optimizer={},
        stepped_by=store.stepped_by,
        protocol_sha256=own.digest(ledger.named[0]),
        correct=store.corrected_by,
        apply=store.applies,
        workers=saved(ledger.told),
    )


def saved_rule(protocol: Pacing) -> SavedRule:
    """The protocol as a checkpoint keeps it, with what it remembers."""
    return SavedRule(type(protocol).__name__, resolved(protocol), memory(protocol))
