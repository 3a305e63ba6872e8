"""The event loop: events in the order of virtual time, and a pacer that is asked about each.

One iteration of a worker is

    released -> pull -> compute -> push -> its turn at the store -> the verdict -> released ...

and costs one event, its arrival at the store. Where workers keep barriers of their own, one looks as soon
as its push was added, which takes no time, and then again and again until it has passed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from itertools import count, islice
from math import inf

from paceline.errors import RunError
from paceline.protocols import PACED, Decision, Pacer, Pacing, own
from paceline.protocols.paced.psp_distributed import PeerBarrier, own_barrier
from paceline.sim.agenda import ARRIVAL, JOIN, KILL, LOOK, SEND, STOP, STORE_FREE, TIMER, Agenda, Event
from paceline.sim.cluster import Cluster
from paceline.sim.network.paced import StoreWays, store_ways
from paceline.sim.record import Reason, SimulationRecord
from paceline.sim.timing import Timing
from paceline.sim.work import Work

_EVENTS_PER_REPORT = 8192
_MOST_IDLE_TIMERS = 10_000
_WEIGHTS = -1.0
"""In the place of compute seconds: weights are sent, and no gradient yet."""


def name_of(protocol: Pacing) -> str:
    """The name a protocol is registered under; an unregistered one goes by its class."""
    names = (name for name, cls in PACED.items() if type(protocol) is cls)
    return next(names, None) or own.loaded_as(type(protocol)) or type(protocol).__name__.lower()


class Loop:
    """Holds what is under way, and carries the pacer's decisions out."""

    def __init__(
        self,
        pacer: Pacer,
        cluster: Cluster,
        timing: Timing,
        work: Work,
        record: SimulationRecord,
        exchange_s: list[float],
    ) -> None:
        """`exchange_s`: what every worker's exchanges take, for the record; kept up to date if it varies."""
        workers = range(cluster.workers)
        self._pacer = pacer
        self._cluster = cluster
        self._timing = timing
        self._work = work
        self._record = record
        self._batch = cluster.batch
        self._samples = work.samples
        self._measures = work.measures
        self._apply_s = cluster.apply_s
        self._ways = store_ways(cluster)
        self._sending: dict[float, list[Event]] = {}  # what leaves at which moment, where links are shared
        self._exchange_s = exchange_s
        self._pull_s = [timing.pull_s(worker) for worker in workers]
        self._push_s = [timing.push_s(worker) for worker in workers]
        self._agenda = Agenda()
        # What every event needs, looked up once.
        self._add, self._draw, self._compute_s = self._agenda.add, work.draw, timing.compute_s
        self._push, self._pushed = pacer.push, record.pushed
        self._number = count(1).__next__  # of events, in the order they are planned
        self._under_way: list[Event | None] = [None for _ in workers]  # each one's last arrival
        self._queue: deque[Event] = deque()
        self._idle: dict[int, None] = {}  # there, but without work: called back if work is given back
        self._leaving: deque[int] = deque()
        self._free_at = 0.0
        self._now = 0.0
        self._timer: Event | None = None
        self._idle_timers = 0
        self._barriers: dict[int, PeerBarrier] = {}  # of all who take part, if they keep their own
        self._members: list[int] = []  # the same, by rank; empty until the next look after a change
        self._stopped = False

    def run(
        self, progress: Callable[[float], None], until_s: float | None = None, park: Collection[int] = ()
    ) -> None:
        """From the first join to the last event, or to `until_s` if that comes first."""
        if until_s is not None:
            self._plan(until_s, STOP, 0)
        for event in self._cluster.event:
            self._plan(event.at_s, JOIN if event.kill is None else KILL, event.rank)
        absent = self._cluster.absent_at_start().union(park)
        for worker in range(self._cluster.workers):
            if worker not in absent:
                self._join(worker, 0.0)
        events = iter(self._agenda)
        while self._agenda:
            self._go_on(islice(events, _EVENTS_PER_REPORT))
            done = self._pacer.clocks.total_samples / (self._work.total * self._batch)
            progress(max(done, self._now / (until_s or inf)))
        self._end()

    def _go_on(self, events: Iterable[Event]) -> None:
        under_way = self._under_way
        for event in events:
            now, kind, _, worker, compute_s, position = event
            if kind != ARRIVAL:
                self._happen(event)
            elif under_way[worker] is event:  # else the worker was lost on the way
                if now < self._free_at:  # once it is free, those who queued have gone first
                    self._queue_up(event)
                else:
                    self._serve(now, worker, compute_s, position)
            if self._leaving:
                self._send_home()

    def _happen(self, event: Event) -> None:
        time, kind, _, worker, _, _ = event
        if kind == JOIN:
            self._join(worker, time)
        elif kind == KILL:
            self._kill(worker, time)
        elif kind == STORE_FREE:
            self._serve_next(time)
        elif kind == STOP:
            self._stop(time)
        elif kind == SEND:
            if self._ways is not None:
                self._send_off(time, self._ways)
        elif kind == LOOK:
            if self._under_way[worker] is event:
                self._now = time
                self._look(worker)
        elif event is self._timer and self._pacer.clocks.active:
            self._ring(time)

    def _plan(self, time: float, kind: int, worker: int) -> Event:
        event = (time, kind, self._number(), worker, 0.0, 0)
        self._add(event)
        return event

    # The store: one push at a time, in the order of arrival.

    def _queue_up(self, event: Event) -> None:
        if not self._queue:
            self._plan(self._free_at, STORE_FREE, event[3])
        self._queue.append(event)

    def _serve_next(self, now: float) -> None:
        while self._queue:
            _, _, _, worker, compute_s, position = event = self._queue.popleft()
            if self._under_way[worker] is event:
                self._serve(now, worker, compute_s, position)
                break
        if self._queue:
            self._plan(self._free_at, STORE_FREE, self._queue[0][3])

    def _serve(self, now: float, worker: int, compute_s: float, position: int) -> None:
        self._now, self._free_at = now, now + self._apply_s
        samples = self._samples[worker]
        decision = self._push(worker, now, samples)
        self._pushed(now, decision, worker, compute_s, position)
        if decision.release:
            self._begin(decision.release)
        if self._timer is not None or decision.ask_again_s is not None:
            self._set_timer(decision)
        if self._measures:
            self._work.pushed(worker, samples, compute_s)
        if worker in self._barriers:
            self._look(worker)

    # Barriers that workers keep themselves.

    def _keep_barrier(self, worker: int) -> None:
        barrier = own_barrier(self._pacer.protocol, worker)
        if barrier is not None:
            self._barriers[worker] = barrier
            self._members.clear()

    def _drop_barrier(self, worker: int) -> None:
        if self._barriers.pop(worker, None) is not None:
            self._members.clear()

    def _look(self, worker: int) -> None:
        """Let a worker that waits look at others' clocks, and go on or look again later."""
        barrier, clocks = self._barriers[worker], self._pacer.clocks
        if not self._members:
            self._members.extend(sorted(self._barriers))
        if not barrier.may_advance(clocks.clock(worker), self._members, clocks.clock):
            self._under_way[worker] = self._plan(self._now + barrier.poll_s, LOOK, worker)
            return
        decision = self._pacer.passed(worker, self._now)
        self._record.passed(self._now, decision, worker, barrier.tries, barrier.asked)
        self._carry_out(decision)

    # Decisions.

    def _carry_out(self, decision: Decision) -> None:
        if decision.release:
            self._begin(decision.release)
        self._set_timer(decision)

    def _set_timer(self, decision: Decision) -> None:
        again_s = decision.ask_again_s
        self._timer = None if again_s is None else self._plan(self._now + again_s, TIMER, 0)

    def _begin(self, workers: tuple[int, ...]) -> None:
        """Send workers on their next iteration, by rank as a store answers; who finds no work is to leave.

        The store first finishes what it is busy with, then they pull.
        """
        at = self._free_at if self._free_at > self._now else self._now
        if self._ways is not None:
            self._begin_on_hosts(workers, at)
            return
        for worker in workers if len(workers) == 1 else sorted(workers):
            position = self._draw(worker)
            if position is None:
                self._leaving.append(worker)
                continue
            begin = at + self._pull_s[worker]
            batches = self._samples[worker] / self._batch if self._measures else 1.0
            compute_s = self._compute_s(worker, begin, batches)
            arrives = begin + compute_s + self._push_s[worker]
            event = (arrives, ARRIVAL, self._number(), worker, compute_s, position)
            self._under_way[worker] = event
            self._add(event)

    def _begin_on_hosts(self, workers: tuple[int, ...], at: float) -> None:
        """The same where links are shared: when who has its weights depends on who else is sent some."""
        for worker in sorted(workers):
            position = self._draw(worker)
            if position is None:
                self._leaving.append(worker)
            else:
                self._send(at, worker, _WEIGHTS, position)

    def _send(self, at: float, worker: int, compute_s: float, position: int) -> None:
        """Plan to send weights to a worker, or the gradient that it has computed for so long."""
        event = (at, SEND, self._number(), worker, compute_s, position)
        self._under_way[worker] = event
        self._sending.setdefault(at, []).append(event)
        self._add(event)

    def _send_off(self, now: float, ways: StoreWays) -> None:
        """All that is to be sent at this moment."""
        due = [event for event in self._sending.pop(now, ()) if self._under_way[event[3]] is event]
        there = [event for event in due if event[4] == _WEIGHTS]
        back = [event for event in due if event[4] != _WEIGHTS]
        begins = ways.pull([event[3] for event in there], now, once=self._pacer.in_lockstep)
        for _, _, _, worker, _, position in there:
            batches = self._samples[worker] / self._batch if self._measures else 1.0
            compute_s = self._compute_s(worker, begins[worker], batches)
            self._exchange_s[worker] = begins[worker] - now
            self._send(begins[worker] + compute_s, worker, compute_s, position)
        arrives = ways.push([event[3] for event in back], now)
        for _, _, _, worker, compute_s, position in back:
            self._exchange_s[worker] += arrives[worker] - now + self._apply_s
            event = (arrives[worker], ARRIVAL, self._number(), worker, compute_s, position)
            self._under_way[worker] = event
            self._add(event)

    def _ring(self, time: float) -> None:
        """A timer rang. A protocol that only ever asks again would keep the run from ending."""
        self._now = time
        clocks = self._pacer.clocks
        all_wait = clocks.waiting_count == len(clocks.active)
        self._idle_timers = self._idle_timers + 1 if all_wait else 0
        if self._idle_timers > _MOST_IDLE_TIMERS:
            self._fail(
                f"protocol {name_of(self._pacer.protocol)!r} asked for {_MOST_IDLE_TIMERS} timers in a row "
                "while all workers wait. It must release one of them in the end."
            )
        decision = self._pacer.timer(time)
        self._record.asked(time, decision)
        self._carry_out(decision)

    # Who takes part.

    def _join(self, worker: int, time: float) -> None:
        if self._pacer.clocks.is_present(worker):
            return
        if not self._work.has_some_for(worker):
            self._idle[worker] = None
            return
        self._now = time
        self._idle.pop(worker, None)
        self._record.joined(time, worker)
        self._keep_barrier(worker)
        decision = self._pacer.join(worker, time)
        self._record.asked(time, decision)
        self._begin((worker,))
        self._carry_out(decision)

    def _leave(self, worker: int, reason: Reason, unfinished: int) -> None:
        self._record.left(self._now, worker, reason, unfinished)
        self._work.leave(worker)
        self._drop_barrier(worker)
        decision = self._pacer.leave(worker, self._now)
        self._record.asked(self._now, decision)
        self._carry_out(decision)

    def _send_home(self) -> None:
        """One leaves after another: each may free others, who may find no work either."""
        while self._leaving:
            worker = self._leaving.popleft()
            self._idle[worker] = None
            self._leave(worker, "finished", 0)

    def _kill(self, worker: int, time: float) -> None:
        """A worker is lost; what it was computing is dispensed again, to one that had finished if need be."""
        if not self._pacer.clocks.is_present(worker):
            self._idle.pop(worker, None)
            return
        self._now = time
        lost = None if self._pacer.clocks.is_waiting(worker) else self._under_way[worker]
        if lost is not None:
            self._work.give_back(worker, lost[5])
        self._under_way[worker] = None
        self._leave(worker, "died", self._samples[worker] if lost else 0)
        if lost and self._idle:
            self._join(next(iter(self._idle)), time)

    # The end.

    def _stop(self, time: float) -> None:
        """The run ends here, whoever computes or waits: nobody is asked any more."""
        clocks, more_to_come = self._pacer.clocks, bool(self._agenda)
        self._agenda.clear()
        if clocks.active or (more_to_come and self._work.undone):
            self._now, self._stopped = time, True
        for worker in sorted([*clocks.active, *clocks.benched]):
            unfinished = 0 if clocks.is_waiting(worker) else self._samples[worker]
            self._record.left(time, worker, "finished", unfinished)

    def _end(self) -> None:
        if self._stopped:
            self._record.ended(self._now, "finished", "")
            return
        clocks, work = self._pacer.clocks, self._work
        if clocks.active or clocks.benched:
            self._fail(
                f"protocol {name_of(self._pacer.protocol)!r} releases no worker: all {clocks.waiting_count} "
                "workers wait and nothing is under way. Its decide() must release one of them."
            )
        if work.undone:
            self._fail(
                f"all workers are lost, with {work.undone} of {work.total} pushes undone. "
                "Kill fewer, or let one join again."
            )
        self._record.ended(max(self._now, self._free_at), "finished", "")

    def _fail(self, text: str) -> None:
        text = f"at {self._now:g} s of virtual time: {text}"
        self._record.ended(self._now, "failed", text)
        raise RunError(text)
