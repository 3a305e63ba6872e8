"""The clock table against a model that keeps plain lists and scans them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.protocols.core.clocks import ClockTable

INFINITY = float("inf")
ranks = st.integers(0, 5)


class TableAndModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = ClockTable()
        self.clock: dict[int, int] = {}
        self.floor = 0
        self.waiting: list[int] = []
        self.times: dict[int, list[float]] = {}
        self.samples = 0
        self.read: dict[int, int] = {}
        self.held: list[tuple[int, float]] = []
        self.pushes = 0

    def pick(self, data: Any, workers: Any) -> int:
        return data.draw(st.sampled_from(sorted(workers)))

    @rule(worker=ranks)
    def join(self, worker: int) -> None:
        if worker in self.clock:
            return
        self.table.join(worker)
        self.clock[worker] = min(self.clock.values(), default=self.floor)
        self.times[worker] = []
        self.read[worker] = self.table.version

    @precondition(lambda self: self.clock)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        worker = self.pick(data, self.clock)
        self.table.leave(worker)
        self.floor = min(self.clock.values())
        del self.clock[worker]
        self.waiting = [w for w in self.waiting if w != worker]

    @precondition(lambda self: self.clock.keys() - self.waiting)
    @rule(data=st.data(), ticks=st.integers(0, 5), samples=st.integers(0, 9))
    def push(self, data: Any, ticks: int, samples: int) -> None:
        worker = self.pick(data, self.clock.keys() - self.waiting)
        self.table.now += ticks / 8
        self.table.push(worker, samples)
        self.clock[worker] += 1
        self.waiting.append(worker)
        self.times[worker].append(self.table.now)
        self.samples += samples
        self.pushes += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), steps=st.integers(0, 2))
    def release(self, data: Any, steps: int) -> None:
        worker = self.pick(data, self.waiting)
        self.table.version += steps
        self.table.release(worker)
        self.waiting.remove(worker)
        self.read[worker] = self.table.version

    @rule(worker=ranks, weight=st.sampled_from([0.5, 1.0, 2.0]))
    def hold(self, worker: int, weight: float) -> None:
        self.table.hold(worker, weight)
        self.held.append((worker, weight))

    @rule()
    def flush(self) -> None:
        owners = sorted({worker for worker, _ in self.held})
        expected = [(w, sum(weight for owner, weight in self.held if owner == w)) for w in owners]
        assert list(self.table.flush().items()) == expected
        self.held = []

    @invariant()
    def clocks_agree(self) -> None:
        assert dict(self.table.completed) == self.clock
        assert set(self.table.active) == self.clock.keys()
        assert {w: self.table.clock(w) for w in self.clock} == self.clock
        assert self.table.pushes == self.pushes
        assert self.table.total_samples == self.samples
        assert self.table.held == len(self.held)

    @invariant()
    def extremes_and_gaps_agree(self) -> None:
        if self.clock:
            slowest = min(self.clock.values())
            assert self.table.slowest == slowest
            assert self.table.fastest == max(self.clock.values())
            assert {w: self.table.gap(w) for w in self.clock} == {
                w: c - slowest for w, c in self.clock.items()
            }
            assert self.table.laggard() == self.laggard()

    def laggard(self) -> int:
        slowest = min(self.clock.values())
        return max((w for w, c in self.clock.items() if c == slowest), key=lambda w: (self.expected_s(w), w))

    def expected_s(self, worker: int) -> float:
        times = self.times[worker]
        return INFINITY if len(times) < 2 else 2 * times[-1] - times[-2]

    @invariant()
    def waiting_agrees_for_every_limit(self) -> None:
        in_order = sorted(self.waiting, key=lambda w: self.clock[w])  # stable: who waited first
        assert self.table.waiting() == tuple(in_order)
        assert self.table.waiting_count == len(in_order)
        assert {w for w in range(6) if self.table.is_waiting(w)} == set(in_order)
        for limit in range(-1, max(self.clock.values(), default=0) + 2):
            up_to = tuple(w for w in in_order if self.clock[w] <= limit)
            assert self.table.waiting(up_to=limit) == up_to

    @invariant()
    def counts_below_agree_for_every_clock(self) -> None:
        for clock in range(-1, max(self.clock.values(), default=0) + 2):
            assert self.table.count_below(clock) == sum(c < clock for c in self.clock.values())

    @invariant()
    def times_and_staleness_agree(self) -> None:
        for worker in self.clock:
            times = self.times[worker]
            assert self.table.last_push_s(worker) == (times[-1] if times else None)
            interval = times[-1] - times[-2] if len(times) > 1 else None
            assert self.table.interval_s(worker) == interval
            assert self.table.staleness(worker) == self.table.version - self.read[worker]


TestTableAndModel = TableAndModel.TestCase


def test_a_worker_that_comes_back_starts_at_the_clock_of_the_slowest() -> None:
    table = ClockTable()
    table.join(0)
    table.join(1)
    for _ in range(3):
        table.push(0, 1)
        table.release(0)
    table.push(1, 1)
    table.leave(0)
    table.join(0)
    assert dict(table.completed) == {1: 1, 0: 1}
    assert (table.slowest, table.fastest) == (1, 1)


def test_who_comes_after_all_have_left_goes_on_where_the_last_one_was() -> None:
    table = ClockTable()
    table.join(0)
    table.push(0, 1)
    table.leave(0)
    table.join(1)
    assert (table.clock(1), table.slowest, table.fastest) == (1, 1, 1)


def test_a_worker_that_comes_back_has_no_push_times_yet() -> None:
    table = ClockTable()
    table.join(0)
    table.now = 1.0
    table.push(0, 1)
    table.leave(0)
    table.join(0)
    assert table.last_push_s(0) is None
    table.now = 2.0
    table.push(0, 1)
    assert table.interval_s(0) is None
