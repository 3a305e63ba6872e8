"""The clock table when workers are set aside, taken back, and put level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.protocols import Clocks, Pacer, Verdict
from paceline.protocols.core.clocks import ClockTable

ranks = st.integers(0, 5)


class Regrouping(RuleBasedStateMachine):
    """Against a model that keeps plain lists and scans them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ClockTable()
        self.clock: dict[int, int] = {}
        self.floor = 0
        self.waiting: list[int] = []
        self.benched: dict[int, int] = {}
        self.samples = 0
        self.began: dict[int, float] = {}
        self.took: dict[int, float | None] = {}

    def take_out(self, worker: int) -> int:
        self.floor = min(self.clock.values())
        self.waiting = [w for w in self.waiting if w != worker]
        return self.clock.pop(worker)

    def take_in(self, worker: int) -> None:
        self.clock[worker] = min(self.clock.values(), default=self.floor)
        self.began[worker], self.took[worker] = self.table.now, None

    @rule(worker=ranks)
    def join(self, worker: int) -> None:
        if worker not in self.clock and worker not in self.benched:
            self.table.join(worker)
            self.take_in(worker)

    @precondition(lambda self: self.clock or self.benched)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.clock.keys() | self.benched.keys())))
        self.table.leave(worker)
        if worker in self.benched:
            del self.benched[worker]
        else:
            self.take_out(worker)

    @precondition(lambda self: self.clock.keys() - self.waiting)
    @rule(data=st.data(), ticks=st.integers(0, 5), samples=st.integers(0, 9))
    def push(self, data: Any, ticks: int, samples: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.clock.keys() - self.waiting)))
        self.table.now += ticks / 8
        self.table.push(worker, samples)
        self.clock[worker] += 1
        self.waiting.append(worker)
        self.samples += samples
        self.took[worker] = self.table.now - self.began[worker]

    @precondition(lambda self: self.waiting or self.benched)
    @rule(data=st.data())
    def release(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted({*self.waiting, *self.benched})))
        self.table.release(worker)
        if worker in self.benched:
            del self.benched[worker]
            self.take_in(worker)
        else:
            self.waiting.remove(worker)
            self.began[worker], self.took[worker] = self.table.now, None

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def bench(self, data: Any) -> None:
        worker = data.draw(st.sampled_from(sorted(self.waiting)))
        self.table.bench(worker)
        self.benched[worker] = self.take_out(worker)

    @rule()
    def rebase(self) -> None:
        self.table.rebase()
        self.waiting.sort(key=self.clock.__getitem__)
        self.clock = dict.fromkeys(self.clock, max(self.clock.values(), default=0))

    @invariant()
    def clocks_agree(self) -> None:
        table = self.table
        assert dict(table.completed) == self.clock
        assert {w: table.clock(w) for w in self.clock | self.benched} == self.clock | self.benched
        assert list(table.benched) == list(self.benched)
        if self.clock:
            assert (table.slowest, table.fastest) == (min(self.clock.values()), max(self.clock.values()))
            assert table.clock(table.laggard()) == table.slowest
        for clock in range(max(self.clock.values(), default=0) + 2):
            assert table.count_below(clock) == sum(c < clock for c in self.clock.values())

    @invariant()
    def who_waits_agrees(self) -> None:
        table = self.table
        assert table.waiting() == tuple(sorted(self.waiting, key=lambda w: self.clock[w]))
        assert table.waiting_count == len(self.waiting)
        assert {w for w in range(6) if table.is_waiting(w)} == {*self.waiting, *self.benched}
        assert {w for w in range(6) if table.is_present(w)} == {*self.clock, *self.benched}

    @invariant()
    def work_and_times_agree(self) -> None:
        table = self.table
        assert table.total_samples == self.samples
        assert table.batch * table.pushes == pytest.approx(self.samples)
        assert {w: table.run_s(w) for w in self.clock} == {w: self.took[w] for w in self.clock}


TestRegrouping = Regrouping.TestCase


@dataclass
class Says:
    """Gives the verdicts it was told to give."""

    lockstep: ClassVar[bool] = False
    verdicts: list[Verdict]

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict() if pushed is None else self.verdicts.pop(0)


def started(*verdicts: Verdict, workers: int = 2) -> Pacer:
    pacer = Pacer(Says(list(verdicts)))
    for worker in range(workers):
        pacer.join(worker, 0.0)
    return pacer


def test_who_is_set_aside_and_released_later_reads_the_weights_of_then() -> None:
    pacer = started(Verdict(bench=(0,)), Verdict(release=(1,)), Verdict(release=(1, 0)))
    assert pacer.push(0, 1.0).bench == (0,)
    assert set(pacer.clocks.active) == {1}
    pacer.push(1, 2.0)
    assert pacer.push(1, 3.0).release == (1, 0)
    assert set(pacer.clocks.active) == {0, 1}
    assert pacer.clocks.staleness(0) == 0
    assert (pacer.clocks.clock(0), pacer.clocks.clock(1)) == (2, 2)


def test_a_rebase_comes_before_the_releases_so_that_they_start_level() -> None:
    pacer = started(Verdict(release=(0,)), Verdict(), Verdict(release=(0, 1), rebase=True))
    pacer.push(0, 1.0)
    pacer.push(0, 2.0)
    decision = pacer.push(1, 3.0)
    assert (decision.rebase, decision.gap) == (True, 0)
    assert dict(pacer.clocks.completed) == {0: 2, 1: 2}


def test_adjustments_and_notes_are_passed_on() -> None:
    decision = started(Verdict(adjust={"momentum": 0.5}, note="begins")).push(0, 1.0)
    assert (decision.adjust, decision.note) == ({"momentum": 0.5}, "begins")
    plain = started(Verdict(release=(0,))).push(0, 1.0)
    assert (plain.bench, plain.rebase, plain.adjust, plain.note) == ((), False, None, "")


@pytest.mark.parametrize("bench", [(1,), (0, 0), (7,)], ids=["computing", "twice", "absent"])
def test_only_who_waits_can_be_set_aside(bench: tuple[int, ...]) -> None:
    with pytest.raises(KeyError):
        started(Verdict(bench=bench)).push(0, 1.0)


def test_a_resumed_run_counts_on_and_its_earlier_samples_are_no_pushes() -> None:
    pacer = Pacer(Says([Verdict(release=(0,))]))
    pacer.resume(40, 1000)
    pacer.plan(5000)
    pacer.join(0, 0.0)
    assert (pacer.clocks.version, pacer.clocks.total_samples, pacer.clocks.batch) == (40, 1000, 0.0)
    pacer.push(0, 1.0, samples=8)
    assert (pacer.clocks.total_samples, pacer.clocks.batch, pacer.clocks.planned) == (1008, 8.0, 5000)
