"""Peers in virtual time, sizes only: the protocol objects of a real run, and the place where they meet.

What meeting costs stands in `costs.py`. Optimizers are taken to remember one vector, and models to have 64
tensors of equal size. Steps, copies and compressing cost nothing. What is started travels beside computing,
as if on a network of its own. Where nobody waits for anybody, work is one pile and a fast worker does more of
it, as in a real run; else it is dealt equally. What a lost worker has not done of its own stays undone.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from math import inf
from typing import Any, Literal

import msgspec

from paceline.errors import RunError
from paceline.protocols import PEERS, Decision, Pacer, Peer, own
from paceline.protocols.core.asleep import Asleep
from paceline.protocols.core.meeting import SETTLING, Gathered, Kind, Meeting, call_of
from paceline.protocols.core.operations import (
    Agree,
    Average,
    Compute,
    Exchange,
    Handle,
    Joint,
    Mix,
    Now,
    Operation,
    Probe,
    Recall,
    Start,
    Test,
    Wait,
)
from paceline.protocols.core.peer import Done, Me, life
from paceline.protocols.core.peer_books import PeerBooks
from paceline.protocols.rules.compression import FLOAT_BYTES, Compression, Treatment
from paceline.protocols.settings import resolved
from paceline.sim.cluster import Cluster
from paceline.sim.compute import require
from paceline.sim.costs import costs_of
from paceline.sim.phantom import Phantom, PhantomTensors
from paceline.sim.record import Emit, Full, Reason, SimulationRecord, Summary
from paceline.sim.timing import Timing
from paceline.sim.work import EqualShards, SharedBudget, Work
from paceline.trace import Tally
from paceline.trace.events import SCHEMA, AnyEvent, Exchanged, ModelReady, RunStarted

SUMMARISE_ABOVE = 200_000
EVENTS_PER_REPORT = 4096
KILL, WAKE = range(2)


def simulate_peers(
    protocol: Peer,
    cluster: Cluster,
    *,
    iterations: int,
    seed: int = 0,
    summarise: bool | None = None,
    trace: Emit | None = None,
    progress: Callable[[float], None] | None = None,
    run: str = "simulated",
    started_at: str = "",
    compress: Compression = Compression(),
    equal_shards: bool = False,
) -> Tally:
    """Let every worker complete so many iterations, on average, and add up what happened.

    `equal_shards`: exactly so many, also where nobody waits for anybody.
    """
    require(iterations >= 1, "iterations must be >= 1", iterations, "Use --iterations 100, say.")
    late = [event for event in cluster.event if event.join is not None]
    require(not late, "peers cannot join late yet, events", len(late), "Leave [[event]] join out.")
    protocol.check(cluster.workers)
    total = cluster.workers * iterations
    summarised = total > SUMMARISE_ABOVE if summarise is None else summarise
    tally = Tally()

    def emit(event: AnyEvent) -> None:
        tally.add(event)
        if trace is not None:
            trace(event)

    emit(_started(protocol, cluster, run, started_at, seed, summarised, compress))
    if cluster.model_bytes is not None:
        size = cluster.model_bytes
        emit(ModelReady(0.0, size // 4, size, size))
    work: Work = EqualShards(cluster.workers, iterations, [cluster.batch] * cluster.workers)
    if protocol.free and not equal_shards:
        work = SharedBudget(total, work.samples)
    loop = PeerLoop(protocol, cluster, work, seed, emit, summarised, compress)
    loop.run(progress or (lambda share: None))
    return tally


class _Worker:
    """One worker's way through its iterations."""

    def __init__(self, protocol: Peer, rank: int, cluster: Cluster, seed: int) -> None:
        size, everybody = cluster.workers, tuple(range(cluster.workers))
        model = Phantom(cluster.model_bytes or 0)
        self.me = Me(rank, size, seed, model, Phantom(0), members=everybody, samples=cluster.batch)
        self.me.tensors = PhantomTensors(model.size_bytes)
        self.life: Generator[Operation | Done, Any, None] = life(protocol, self.me)
        self.compute_s: float | None = None
        """Of an iteration that is not on record yet."""
        self.position = 0
        """Of that iteration, in the work of all."""
        self.alive = True
        self.begun = False
        self.lane = 0
        self.started = 0
        self.there_at: dict[int, float] = {}
        """When the answers to started operations are there."""
        self.waits_for: int | None = None


class PeerLoop:
    """Virtual time as a heap of wakings."""

    def __init__(
        self,
        protocol: Peer,
        cluster: Cluster,
        work: Work,
        seed: int,
        emit: Emit,
        summarised: bool,
        compress: Compression,
    ) -> None:
        self._compress = compress
        self._protocol, self._cluster, self._emit = protocol, cluster, emit
        self._work = work
        self._costs = costs_of(cluster, compress)
        self._timing = Timing(cluster, seed)
        self._roll = PeerBooks()
        self._pacer = Pacer(self._roll)
        self._meeting = Meeting()
        self._asleep = Asleep()
        self._workers = [_Worker(protocol, rank, cluster, seed) for rank in range(cluster.workers)]
        self._exchange_s = [0.0] * cluster.workers
        self._sent = [0] * cluster.workers, [0] * cluster.workers
        """Bytes that each gave away and waited for, and those with which it went on."""
        self._summarised = summarised
        clocks, batch = self._pacer.clocks, cluster.batch
        self._record: SimulationRecord = Full(
            emit, clocks, work.samples, batch, self._exchange_s, self._asleep
        )
        if summarised:
            self._record = Summary(emit, clocks, cluster.workers, work.total, self._asleep)
        self._heap: list[tuple[float, int, int, int, Any]] = []
        self._sequence = 0
        self._now = 0.0

    def run(self, progress: Callable[[float], None]) -> None:
        """Until everybody has done its share, or is lost."""
        for event in self._cluster.event:
            self._plan(event.at_s, KILL, event.rank)
        for worker in self._workers:
            rank = worker.me.rank
            self._record.joined(0.0, rank)
            self._pacer.join(rank, 0.0)
            self._meeting.join(rank)
            self._plan(0.0, WAKE, rank)
        while self._heap:
            self._now, kind, _, rank, answer = heappop(self._heap)
            if kind == KILL and self._workers[rank].alive:
                self._leave(rank, "died")
            elif kind == WAKE and self._workers[rank].alive:
                self._go_on(self._workers[rank], answer)
            if self._sequence % EVENTS_PER_REPORT == 0:
                progress(self._pacer.clocks.pushes / self._work.total)
        self._end()

    def _plan(self, time_s: float, kind: int, rank: int, answer: Any = None) -> None:
        self._sequence += 1
        heappush(self._heap, (time_s, kind, self._sequence, rank, answer))

    # -- one worker ---------------------------------------------------------------------------

    def _go_on(self, worker: _Worker, answer: Any) -> None:
        """Up to where it computes, meets, waits or is done."""
        self._asleep.woke(worker.me.rank, self._now)
        if not worker.begun and self._protocol.apart and not self._draw(worker):
            return self._finish(worker)
        worker.begun = True
        while True:
            try:
                operation = worker.life.send(answer)
            except StopIteration:
                return self._leave(worker.me.rank, "finished")
            answer = None
            match operation:
                case Compute():
                    return self._compute(worker)
                case Probe():
                    rank, again_s = worker.me.rank, self._timing.compute_s(worker.me.rank, self._now)
                    return self._plan(self._now + again_s, WAKE, rank, worker.me.parameters.clone())
                case Average() | Mix() | Agree():
                    return self._meet(worker, operation, worker.lane)
                case Wait():
                    return self._wait(worker, operation.handle.lane)
                case Exchange():
                    return self._exchange(worker, operation)
                case Now():
                    answer = self._now
                case Recall():
                    answer = {"momentum": worker.me.parameters.clone()}
                case Start():
                    answer = self._start(worker, operation.operation)
                case Test():
                    lane, asking_s = operation.handle.lane, self._costs.ask(worker.me.rank, self._now)
                    answer = worker.there_at.get(lane, inf) <= self._now + asking_s
                    if asking_s:
                        return self._hear_back(worker.me.rank, answer, asking_s)
                case Done():
                    if worker.compute_s is not None:
                        self._book(worker, {worker.me.rank})
                    if self._protocol.apart and not self._draw(worker):
                        return self._finish(worker)

    def _draw(self, worker: _Worker) -> bool:
        """Whether there is work for it. Where workers are apart, that is known before an iteration begins:
        nobody brings a vector to one that it does not do."""
        position = self._work.draw(worker.me.rank)
        worker.position = worker.position if position is None else position
        return position is not None

    def _compute(self, worker: _Worker) -> None:
        rank = worker.me.rank
        if self._protocol.apart or self._draw(worker):
            worker.compute_s = self._timing.compute_s(rank, self._now)
            self._plan(self._now + worker.compute_s, WAKE, rank, worker.me.parameters.clone())
        else:
            self._finish(worker)

    def _finish(self, worker: _Worker) -> None:
        """No more work: bring to an end what is under way."""
        if not self._protocol.settles:
            return self._leave(worker.me.rank, "finished")
        worker.life, worker.lane = self._protocol.settle(worker.me), SETTLING
        self._carry_out(self._meeting.retire(worker.me.rank), None)
        return self._plan(self._now, WAKE, worker.me.rank)

    def _meet(self, worker: _Worker, operation: Joint, lane: int) -> None:
        call = call_of(operation, lane, self._sent_bytes(worker.me, operation))
        if lane <= 0:
            self._sleep(worker)
        self._costs.came(worker.me.rank, call, self._now)
        gathered = self._meeting.arrive(worker.me.rank, call)
        self._carry_out(gathered, worker if lane <= 0 else None)

    def _exchange(self, worker: _Worker, operation: Exchange) -> None:
        """There and back, and nobody else is needed."""
        rank = worker.me.rank
        spent = self._exchange_s[rank] = self._trade(rank, operation, ahead=False)
        self._sleep(worker)
        self._asleep.travels(rank, spent)
        self._book(worker, {rank})
        self._plan(self._now + spent, WAKE, rank, worker.me.parameters)

    def _trade(self, rank: int, operation: Exchange, ahead: bool) -> float:
        there, back = operation.rule.travels(operation.vector.size_bytes)
        spent = self._costs.exchange(rank, there, back, self._now)
        self._gave("exchange", (rank,), there, spent, None if there == back else back, ahead)
        return spent

    def _gave(
        self,
        kind: Kind | Literal["exchange"],
        ranks: tuple[int, ...],
        size: int,
        takes_s: float,
        got: int | None,
        ahead: bool,
    ) -> None:
        """On record: what each of these gave away, and whether it went on meanwhile."""
        for rank in ranks:
            self._sent[ahead][rank] += size
        if not self._summarised:
            known = ahead if self._protocol.sends_ahead else None
            self._emit(Exchanged(self._now, kind, ranks, size, takes_s, got, ahead=known))

    def _hear_back(self, rank: int, answer: bool, asking_s: float) -> None:
        self._asleep.came(rank, self._now, pushes=False)
        self._asleep.travels(rank, asking_s)
        self._exchange_s[rank] = asking_s
        self._plan(self._now + asking_s, WAKE, rank, answer)

    def _start(self, worker: _Worker, operation: Average | Mix | Exchange) -> Handle:
        worker.started += 1
        if isinstance(operation, Exchange):
            worker.there_at[worker.started] = self._now + self._trade(worker.me.rank, operation, ahead=True)
        else:
            self._meet(worker, operation, worker.started)
        return Handle(worker.started)

    def _wait(self, worker: _Worker, lane: int) -> None:
        """Sleep until the answer is there; if it is under way already, that is what it takes."""
        rank, there_at = worker.me.rank, worker.there_at.pop(lane, None)
        self._sleep(worker)
        if there_at is None:
            worker.waits_for = lane
            self._book(worker, set())
            return
        self._exchange_s[rank] = max(0.0, there_at - self._now)
        self._asleep.travels(rank, self._exchange_s[rank])
        self._book(worker, {rank})
        self._plan(max(self._now, there_at), WAKE, rank, worker.me.parameters)

    def _carry_out(self, gathered: list[Gathered], worker: _Worker | None) -> None:
        answered: set[int] = set()
        for each in gathered:
            size, takes_s = each.given_bytes, self._costs.joint(each, self._now)
            value = each.outcome if each.kind == "agree" else Phantom(each.size_bytes)
            for rank in each.receivers:
                spent = takes_s[rank]
                if each.lane <= 0 or self._workers[rank].waits_for == each.lane:
                    self._workers[rank].waits_for = None
                    self._plan(self._now + spent, WAKE, rank, value)
                    self._exchange_s[rank] = spent
                    self._asleep.travels(rank, spent)
                    answered.add(rank)
                else:
                    self._workers[rank].there_at[each.lane] = self._now + spent
            self._gave(each.kind, each.receivers, size, max(takes_s.values()), None, each.lane > 0)
        self._book(worker, answered)

    def _tell_summed_up(self, rank: int, waited_for: int, ahead: int) -> None:
        if not self._protocol.sends_ahead:
            self._emit(Exchanged(self._now, "average", (rank,), waited_for + ahead))
            return
        for size, went_on in ((waited_for, False), (ahead, True)):
            self._emit(Exchanged(self._now, "average", (rank,), size, ahead=went_on))

    def _sleep(self, worker: _Worker) -> None:
        self._asleep.came(worker.me.rank, self._now, pushes=worker.compute_s is not None)

    def _book(self, worker: _Worker | None, answered: set[int]) -> None:
        """An iteration's first word is a push; its first answer is a release."""
        self._roll.answered = answered
        for rank in answered:
            self._asleep.released(rank, self._now)
        if worker is not None and worker.compute_s is not None:
            rank, compute_s, worker.compute_s = worker.me.rank, worker.compute_s, None
            decision = self._pacer.push(rank, self._now, self._cluster.batch)
            self._record.pushed(self._now, _fresh(decision), rank, compute_s, worker.position)
        elif answered:
            self._record.asked(self._now, self._pacer.timer(self._now))

    # -- what it costs ------------------------------------------------------------------------

    def _sent_bytes(self, me: Me, operation: Joint) -> int | None:
        """A vector's bytes on the wire; None: those it has."""
        if isinstance(operation, Agree) or self._compress.treatment(operation, me) is Treatment.WHOLE:
            return None
        return self._compress.wire_bytes(operation.size_bytes // FLOAT_BYTES)

    # -- the end ------------------------------------------------------------------------------

    def _leave(self, rank: int, reason: Reason) -> None:
        worker = self._workers[rank]
        unfinished = self._cluster.batch if reason == "died" and worker.compute_s is not None else 0
        if unfinished:
            self._work.give_back(rank, worker.position)
        worker.alive = False
        self._asleep.woke(rank, self._now)
        worker.life.close()
        self._record.left(self._now, rank, reason, unfinished)
        self._record.asked(self._now, self._pacer.leave(rank, self._now))
        self._carry_out(self._meeting.leave(rank), None)

    def _end(self) -> None:
        waiting = [worker.me.rank for worker in self._workers if worker.alive]
        if self._summarised:
            for rank, sizes in enumerate(zip(*self._sent, strict=True)):
                self._tell_summed_up(rank, *sizes)
        if waiting:
            text = f"at {self._now:g} s of virtual time: ranks {waiting[:8]} wait for ever"
            self._record.ended(self._now, "failed", text)
            raise RunError(text)
        self._record.ended(self._now, "finished", "")


def _fresh(decision: Decision) -> Decision:
    """Peers compute on their own replicas: nothing is stale."""
    return msgspec.structs.replace(decision, staleness=0, read=decision.version)


def _started(
    protocol: Peer, cluster: Cluster, run: str, began: str, seed: int, summarised: bool, compress: Compression
) -> RunStarted:
    names = (name for name, cls in PEERS.items() if type(protocol) is cls)
    name = next(names, None) or own.loaded_as(type(protocol)) or type(protocol).__name__.lower()
    return RunStarted(
        0.0,
        SCHEMA,
        run,
        name,
        resolved(protocol),
        cluster.workers,
        seed,
        simulated=True,
        started_at=began,
        emulated=cluster.describe(),
        summarised=summarised,
        family="peer",
        compress=str(compress),
        protocol_sha256=own.digest(name),
    )
