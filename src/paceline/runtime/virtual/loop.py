"""Exact simulation: real workers, real gradients, virtual time.

The owner, the protocol, the store and the script are those of a real run; only the clock is not.
Workers compute whenever they can, but what they say is heard in the order of virtual time: as soon
as a worker is released, the cluster model tells when its push will arrive, and the owner attends to
arrivals in that order. So accuracy against simulated time is exact, and repeats bit for bit.
Evaluation takes no virtual time.

Peers say more than one word per iteration, so there it is not a push that is put off but the end of every
sleep: a worker that has computed, or was answered, is woken when its time has come, and heard until it sleeps
again. Those who are woken at the same time compute at the same time.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import select
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Literal

import msgspec

from paceline.errors import ConfigError, RunError
from paceline.fabric.channel import Channel
from paceline.fabric.stop_signals import why_stopped
from paceline.protocols.rules.compression import Compression
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.owner import Owner
from paceline.runtime.run.member import Member
from paceline.sim.cluster import Cluster
from paceline.sim.costs import Costs, costs_of
from paceline.sim.network.paced import StoreWays, store_ways
from paceline.sim.network.peers import HostCosts
from paceline.sim.timing import Timing

Kind = Literal["look", "kill", "push", "wake", "ask", "timer", "nap", "send"]
PRIORITY: dict[Kind, int] = {
    "look": 0,
    "kill": 1,
    "push": 2,
    "wake": 2,
    "timer": 3,
    "nap": 3,
    "ask": 4,
    "send": 5,
}
"""Whose gradient was added looks at the others as they are then: nothing comes before that."""


class VirtualLoop:
    """Attends to workers in the order of virtual time."""

    def __init__(self, cluster: Cluster, seed: int, stop: int) -> None:
        if any(event.join is not None for event in cluster.event):
            raise ConfigError(
                "an exact simulation cannot have workers that join late. Leave [[event]] join out."
            )
        self.now = 0.0
        self._cluster = cluster
        self._timing = Timing(cluster, seed)
        self._ways = store_ways(cluster)
        self._to_pull: dict[int, float] = {}
        """Who is released and not on its way yet, and since when."""
        self._begins: dict[int, float] = {}
        """When those who are on their way have their weights."""
        self._took_s: dict[int, float] = {}
        """What the last exchange of each has taken, there and back, where links are shared."""
        self._stop = stop
        self._heap: list[tuple[float, int, int, Kind, int, m.Push | Callable[[], None] | None]] = []
        self._sequence = count()
        self._store_free = 0.0
        self._timer_at: float | None = None

    def attach(self, owner: Owner, workers: list[tuple[Channel, int]]) -> None:
        """The run to attend to."""
        self._owner = owner
        owner.on_release = self._released
        owner.attend = self._attend_to
        owner.on_added = lambda rank: self._at(self.now, "look", rank)
        for rank, (channel, pid) in enumerate(workers):
            owner.add(rank, channel, pid)

    def clock(self) -> float:
        """The virtual time."""
        return self.now

    def costs(self, size_bytes: int, compress: Compression) -> Costs | HostCosts:
        """What it costs peers to meet. Where the cluster names a size of the model, as if it had that one."""
        wanted = self._cluster.model_bytes
        return costs_of(self._cluster, compress, 1.0 if wanted is None else wanted / max(1, size_bytes))

    def put_off(self, time_s: float, rank: int, answer: Callable[[], None]) -> None:
        """Let a sleeping peer have its answer at a later time."""
        self._at(time_s, "wake", rank, answer)

    def exchange_s(self, rank: int) -> float:
        """What an exchange of this rank costs: the way there, the store's work, the way back."""
        if self._ways is not None:
            return self._took_s.get(rank, 0.0) + self._cluster.apply_s
        return self._timing.push_s(rank) + self._cluster.apply_s + self._timing.pull_s(rank)

    def run(self) -> None:
        """Until every worker is gone."""
        for member in self._owner.living:
            while not (member.registered or member.gone or self._owner.halted):
                self._hear(member)
        for event in self._cluster.event:
            self._at(event.at_s, "kill", event.rank)
        self._attend()
        while self._owner.living and self._owner.halted is None:
            self._turn()
            self._set_timer()
        self._drain()

    def _turn(self) -> None:
        if not self._heap:
            self._owner.halt(
                "failed", "every worker waits and nothing is under way: the protocol releases no worker"
            )
            return
        self.now, _, _, kind, rank, what = heapq.heappop(self._heap)
        member = self._owner.members[rank]
        if kind == "timer":
            self._ring()
        elif callable(what):
            self._wake(member, what)
        elif kind == "kill" and not member.gone:
            self._kill(member)
        elif kind == "ask" and not member.gone:
            self._ask(member)
        elif kind == "send" and isinstance(what, m.Push) and self._ways is not None:
            self._send_off(rank, what, self._ways)
        elif kind == "look" and not member.gone:
            self._hear(member)
        elif kind == "nap" and not member.gone:
            self._owner.send(member, m.Elapsed(0.0))
            self._hear(member)
        elif what is not None and not member.gone:
            self._arrive(member, what)

    def _set_timer(self) -> None:
        at = self._owner.ask_at
        if at is not None and at != self._timer_at:
            self._at(at, "timer", 0)
        self._timer_at = at

    def _ring(self) -> None:
        """Unless the protocol has been asked meanwhile, and named another time."""
        if self._owner.ask_at is not None and self._owner.ask_at <= self.now:
            self._owner.timer()

    def _ask(self, member: Member) -> None:
        """Wait, in real time, for what a released worker says next."""
        message = self._hear(member)
        aside = m.Away | m.Back | m.Say | m.PlanEpochs | m.Enough | m.RecallOptimizer | m.Restore
        if isinstance(message, aside) and not member.gone:
            self._at(self.now, "ask", member.rank)

    def _attend_to(self, member: Member) -> None:
        """Only this worker's next word counts now, and it takes no time."""
        self._hear(member)

    def _hear(self, member: Member) -> m.FromWorker | None:
        """One message of this worker. A push is put off to its time; all else is handled at once."""
        ready, _, _ = select.select([member.near.fileno(), self._stop], [], [])
        if self._stop in ready:
            self._owner.halt("stopped", why_stopped(self._stop))
            return None
        try:
            received = member.near.receive(m.worker_decoder)
        except (RunError, OSError):
            received = None
        if received is None:
            self._owner.lost(member, "its process ended")
            return None
        message, fds = received
        if isinstance(message, m.Push):
            self._under_way(member.rank, message)
        else:
            if isinstance(message, m.Computed):
                self._compute(member, message.batches)
            elif isinstance(message, m.Nap):
                self._at(self.now + message.seconds, "nap", member.rank)
            self._owner.handle(member, message, fds)
        return message

    def _under_way(self, rank: int, push: m.Push) -> None:
        begin = self._has_weights(rank)
        compute_s = 0.0
        for _ in range(push.withheld + 1):  # what it kept was computed one after another
            batches = self._owner.batches(push.samples)
            compute_s += self._timing.compute_s(rank, begin + compute_s, batches)
        computed = msgspec.structs.replace(push, compute_s=compute_s)
        if self._ways is None:
            self._at(begin + compute_s + self._timing.push_s(rank), "push", rank, computed)
            return
        self._took_s[rank] = begin - self.now
        self._at(begin + compute_s, "send", rank, computed)

    def _send_off(self, rank: int, push: m.Push, ways: StoreWays) -> None:
        """Gradients that are ready at this moment leave together."""
        leaving = {rank: push}
        while self._heap and self._heap[0][0] == self.now and self._heap[0][3] == "send":
            *_, other, theirs = heapq.heappop(self._heap)
            assert isinstance(theirs, m.Push)
            leaving[other] = theirs
        arrives = ways.push(list(leaving), self.now)
        for each, gradient in leaving.items():
            self._took_s[each] += arrives[each] - self.now
            self._at(arrives[each], "push", each, gradient)

    def _has_weights(self, rank: int) -> float:
        """When a released worker has them. On shared links, those released with it set out with it."""
        if self._ways is None:
            return self.now + self._timing.pull_s(rank)
        if rank in self._to_pull or rank not in self._begins:
            at = self._to_pull.get(rank, self.now)
            together = sorted({rank, *(other for other, since in self._to_pull.items() if since == at)})
            once = self._owner._started.ledger.pacer.in_lockstep
            self._begins |= self._ways.pull(together, self.now, once=once)
            for other in together:
                self._to_pull.pop(other, None)
        return max(self.now, self._begins.pop(rank))

    def _arrive(self, member: Member, push: m.Push) -> None:
        """The store serves one push at a time: whoever comes too early stands in line."""
        if self.now < self._store_free:
            self._at(self._store_free, "push", member.rank, push)
            return
        self._store_free = self.now + self._cluster.apply_s
        self._owner.handle(member, push, [])

    def _released(self, rank: int) -> None:
        if not self._peers:  # these are heard whenever they are awake
            at = max(self.now, self._store_free)
            self._to_pull[rank] = at
            self._at(at, "ask", rank)

    @property
    def _peers(self) -> bool:
        return any(x.registered is not None and x.registered.peer for x in self._owner.members.values())

    # -- peers --------------------------------------------------------------------------------

    def _wake(self, member: Member, answer: Callable[[], None]) -> None:
        """Answer all whose time has come, and then hear them one after another: they compute meanwhile."""
        woken = [member]
        answer()
        while self._heap and self._heap[0][0] == self.now and callable(self._heap[0][-1]):
            *_, rank, other = heapq.heappop(self._heap)
            assert callable(other)
            other()
            woken.append(self._owner.members[rank])
        for each in woken:
            self._hear_out(each)
        self._attend()

    def _attend(self) -> None:
        """Hear every peer that is awake: at the beginning, and whoever else was answered meanwhile."""
        while self._peers and self._owner.halted is None:
            awake = [member for member in self._owner.living if not member.asks]
            if not awake:
                return
            self._hear_out(awake[0])

    def _hear_out(self, member: Member) -> None:
        """Until it sleeps."""
        while not (member.asks or member.gone or self._owner.halted):
            self._hear(member)

    def _compute(self, member: Member, batches: float) -> None:
        """A peer has its gradient; in virtual time it has only begun."""
        compute_s = self._timing.compute_s(member.rank, self.now, batches)
        elapsed = partial(self._owner.send, member, m.Elapsed(compute_s))
        self.put_off(self.now + compute_s, member.rank, elapsed)

    def _kill(self, member: Member) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
        self._owner.lost(member, "killed as the cluster says")

    def _drain(self) -> None:
        """The run is halted: hear everybody's last words."""
        for *_, rank, what in self._heap:
            member = self._owner.members[rank]
            if isinstance(what, m.Push) and not member.gone:
                self._owner.handle(member, what, [])
        for member in self._owner.living:
            while not member.gone:
                received = None
                with contextlib.suppress(RunError, OSError):
                    received = member.near.receive(m.worker_decoder)
                if received is None:
                    self._owner.lost(member, "its process ended")
                else:
                    self._owner.handle(member, *received)

    def _at(
        self, time_s: float, kind: Kind, rank: int, what: m.Push | Callable[[], None] | None = None
    ) -> None:
        entry = (time_s, PRIORITY[kind], next(self._sequence), kind, rank, what)
        heapq.heappush(self._heap, entry)
