"""Drives a paced protocol through a random schedule: no processes, virtual time.

    for step in drive(SSP(staleness=3), Schedule(workers=4, seed=1, speeds=(1, 1, 1, 5))):
        ...                                                     # one event and what was decided

A step's clocks come from a count of its own, not from the clock table, so what is proved on steps
does not rest on the table being right. `drive` itself fails when every worker waits and no timer
runs, and when somebody is released who does not wait. Where workers keep barriers of their own, it asks
the workers as they really are, and fails when the slowest does not pass.

Times are multiples of 1/8 s: they are exact in floating point, and ties do happen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from paceline.protocols import Clocks, Decision, Pacer, Pacing
from paceline.protocols.core.pacer import ParkingRule
from paceline.protocols.paced.psp_distributed import PeerBarrier, own_barrier

TICK_S = 0.125


@dataclass(frozen=True)
class Schedule:
    """Who computes how long, who dies and who joins, and when."""

    workers: int = 4
    seed: int = 0
    speeds: tuple[int, ...] = (2,)
    """Ticks of a worker's quickest iteration, by rank and around again: persistent slowness."""
    transient: float = 0.1
    """How often an iteration takes four times as long: transient slowness."""
    iterations: int = 12
    """What each worker does before it leaves; one that comes back does as many again."""
    deaths: tuple[tuple[int, int], ...] = ()
    """(tick, worker): killed then, computing or waiting; nothing happens if it is not there."""
    joins: tuple[tuple[int, int], ...] = ()
    """(tick, worker): joins or comes back then; nothing happens if it is there."""


@dataclass(frozen=True)
class Step:
    """One event, what was decided, and how things stand then."""

    event: str
    """join, died, finished, push, timer or passed: of a barrier that the worker keeps itself."""
    worker: int
    now: float
    decision: Decision
    before: dict[int, int]
    """The clock of each active worker before the event."""
    after: dict[int, int]
    """And after it: with the worker that joined, without the one that left, the push counted."""
    waited: frozenset[int]
    """Who waited before the decision, the pushing worker and those set aside included."""
    computing: frozenset[int]
    """Who computes after the decision."""
    benched: frozenset[int]
    """Who is set aside after the decision: in the run, but not among the active."""
    clocks: Clocks
    """The table itself, as it stands now."""

    @property
    def released(self) -> tuple[int, ...]:
        return self.decision.release

    @property
    def waiting(self) -> frozenset[int]:
        """Who waits after the decision."""
        return self.after.keys() - self.computing

    @property
    def slowest(self) -> int:
        return min(self.after.values())

    def gap(self, worker: int) -> int:
        """How far a worker is ahead of the slowest, at the moment of the decision."""
        return self.after[worker] - self.slowest


def drive(
    protocol: Pacing,
    schedule: Schedule,
    between: Callable[[Pacer], None] | None = None,
    drop_staler: int | None = None,
    parking: ParkingRule | None = None,
) -> Iterator[Step]:
    """Carry a schedule out, event by event; `between` may do something to the pacer before each."""
    world = _World(Pacer(protocol, drop_staler, parking), schedule)
    while world.queue:
        if between is not None:
            between(world.pacer)
        step = world.next_step()
        if step is not None:
            yield step


class _World:
    """The workers as they really are; the pacer has to find out by itself."""

    def __init__(self, pacer: Pacer, schedule: Schedule) -> None:
        self.pacer = pacer
        self.schedule = schedule
        self.queue: list[tuple[float, int, str, int, int]] = []
        self.sequence = 0
        self.clock: dict[int, int] = {}
        self.floor = 0
        self.left_to_do: dict[int, int] = {}
        self.life: dict[int, int] = {}
        self.computing: set[int] = set()
        self.benched: set[int] = set()
        self.timers = 0
        self.barriers: dict[int, PeerBarrier] = {}
        self.random: dict[int, Random] = {}
        for worker in range(schedule.workers):
            self.at(0.0, "join", worker)
        for tick, worker in schedule.joins:
            self.at(tick * TICK_S, "join", worker)
        for tick, worker in schedule.deaths:
            self.at(tick * TICK_S, "died", worker)

    def at(self, now: float, event: str, worker: int) -> None:
        """Queue an event; a push, a look or a finish concerns only the life the worker leads now."""
        life = self.life.get(worker, 0) if event in ("push", "passed", "finished") else -1
        heapq.heappush(self.queue, (now, self.sequence, event, worker, life))
        self.sequence += 1

    def next_step(self) -> Step | None:
        """Carry the next event out, unless it concerns somebody who is not there."""
        now, _, event, worker, life = heapq.heappop(self.queue)
        if event == "timer":
            self.timers -= 1
        elif (event == "join") == self.is_present(worker) or life not in (-1, self.life.get(worker, 0)):
            return None
        if event == "passed" and not self.looks(worker, now):
            return None
        before = dict(self.clock)
        decision = self.happen(event, worker, now)
        waited = frozenset(self.clock.keys() - self.computing | self.benched)
        if event == "join":
            self.start(worker, now)
            waited -= {worker}
        self.carry_out(decision, now)
        after, computing = dict(self.clock), frozenset(self.computing)
        benched = frozenset(self.benched)
        return Step(
            event, worker, now, decision, before, after, waited, computing, benched, self.pacer.clocks
        )

    def looks(self, worker: int, now: float) -> bool:
        """Let a worker look at others for itself; if it does not pass, it looks again later."""
        barrier = self.barriers[worker]
        if barrier.may_advance(self.clock[worker], sorted(self.clock), self.clock.__getitem__):
            return True
        assert self.clock[worker] > min(self.clock.values()), f"worker {worker} is slowest, and waits"
        self.at(now + barrier.poll_s, "passed", worker)
        return False

    def is_present(self, worker: int) -> bool:
        return worker in self.clock or worker in self.benched

    def happen(self, event: str, worker: int, now: float) -> Decision:
        """Book an event here and tell the pacer."""
        if event == "timer":
            return self.pacer.timer(now)
        if event == "push":
            self.clock[worker] += 1
            self.left_to_do[worker] -= 1
            self.computing.discard(worker)
            if worker in self.barriers:
                self.at(now, "passed", worker)
            return self.pacer.push(worker, now)
        if event == "passed":
            return self.pacer.passed(worker, now)
        if event == "join":
            self.clock[worker] = min(self.clock.values(), default=self.floor)
            self.left_to_do[worker] = self.schedule.iterations
            barrier = own_barrier(self.pacer.protocol, worker)
            if barrier is not None:
                self.barriers[worker] = barrier
            return self.pacer.join(worker, now)
        if worker in self.benched:
            self.benched.discard(worker)
        else:
            self.take_out(worker)
        self.life[worker] = self.life.get(worker, 0) + 1
        self.computing.discard(worker)
        return self.pacer.leave(worker, now)

    def take_out(self, worker: int) -> None:
        """Nobody waits for it any more; who comes after all have gone goes on where the last was."""
        self.floor = min(self.clock.values())
        del self.clock[worker]

    def regroup(self, decision: Decision) -> None:
        """Set some aside, let all start level, take those back who are released."""
        for worker in decision.bench:
            assert worker in self.clock, f"worker {worker} was set aside and is not there"
            assert worker not in self.computing, f"worker {worker} was set aside and did not wait"
            self.take_out(worker)
            self.benched.add(worker)
        if decision.rebase:
            self.clock = dict.fromkeys(self.clock, max(self.clock.values(), default=0))
        for worker in (worker for worker in decision.release if worker in self.benched):
            self.benched.discard(worker)
            self.clock[worker] = min(self.clock.values(), default=self.floor)

    def carry_out(self, decision: Decision, now: float) -> None:
        """Let the released go on, and see that somebody still can."""
        self.regroup(decision)
        for worker in decision.release:
            assert worker in self.clock, f"worker {worker} was released and is not there"
            assert worker not in self.computing, f"worker {worker} was released and did not wait"
            self.start(worker, now)
        if decision.ask_again_s is not None:
            self.timers += 1
            self.at(now + decision.ask_again_s, "timer", -1)
        idle = self.clock.keys() | self.benched
        looks = any(worker in self.barriers for worker in idle)  # the slowest passes its next one
        assert self.computing or self.timers or looks or not idle, f"deadlock: {idle} all wait"

    def start(self, worker: int, now: float) -> None:
        """Compute, and push then; or be done."""
        self.computing.add(worker)
        if self.left_to_do[worker]:
            self.at(now + self.compute_s(worker), "push", worker)
        else:
            self.at(now, "finished", worker)

    def compute_s(self, worker: int) -> float:
        """Each worker has its own stream, so that its times do not depend on who else is there."""
        if worker not in self.random:
            self.random[worker] = Random(self.schedule.seed * 1009 + worker)
        random = self.random[worker]
        quickest = self.schedule.speeds[worker % len(self.schedule.speeds)]
        ticks = quickest + random.randint(0, quickest // 2)
        slow = 4 if random.random() < self.schedule.transient else 1
        return ticks * slow * TICK_S
