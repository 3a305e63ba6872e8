"""Sync-Switch: how much work each phase does, and what is done about stragglers."""

from __future__ import annotations

from math import ceil, floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols import Fate, Pacer
from paceline.protocols.core.base import memory
from paceline.protocols.paced.sync_switch import Online, SyncSwitch
from paceline.protocols.settings import make
from paceline.sim import Cluster, Fixed, Group, Lognormal, Transient, simulate
from support.drive import Schedule, drive
from support.rounds import rounds, started, steps_and_pushes, trace_of
from support.schedules import schedules

every_online = pytest.mark.parametrize("online", ["none", "greedy", "elastic"])
QUICK: dict[str, Any] = {"window": 1, "consecutive": 1}
"""Looks for stragglers after every round, and believes the first look."""


# -- how much work each phase does ------------------------------------------------------------------


@given(
    share=st.floats(0.01, 0.95),
    workers=st.integers(1, 8),
    iterations=st.integers(2, 30),
    batch=st.integers(1, 5),
)
def test_work_is_conserved_and_synchronous_steps_are_the_rounded_share(
    share: float, workers: int, iterations: int, batch: int
) -> None:
    pushes = workers * iterations
    cluster = Cluster(workers=workers, compute=Lognormal(1.0, 0.3), batch=batch)
    decided = trace_of(SyncSwitch(f"bsp@{share},asp", total=pushes * batch), cluster, iterations)
    synchronous, asynchronous, pushed = steps_and_pushes(decided)
    assert synchronous == max(1, floor(share * pushes / workers + 0.5))
    assert pushed == pushes
    assert workers * synchronous + asynchronous == max(pushes, workers * synchronous)


@pytest.mark.parametrize(
    ("pushes", "workers", "share", "steps"),
    [(64_000, 8, 0.0625, 60_500), (64_000, 8, 0.5, 36_000), (64_000, 16, 0.5, 34_000)],
)
def test_global_steps_are_those_of_the_published_runs(
    pushes: int, workers: int, share: float, steps: int
) -> None:
    protocol = SyncSwitch(f"bsp@{share},asp", total=pushes)
    tally = simulate(protocol, Cluster(workers=workers), iterations=pushes // workers, summarise=True)
    assert tally.result().updates == steps


RECOVERING = Cluster(
    workers=4,
    compute=Fixed(1.0),
    group=(Group(3), Group(1, transient=Transient(4.0, 40.0, 40.0))),
)
"""One worker that is slow for a while, again and again."""
PERSISTENT = Cluster(workers=4, compute=Lognormal(1.0, 0.05), slow={3: 3.0})


@pytest.mark.parametrize("seed", range(6))
def test_greedy_detours_change_neither_the_steps_of_the_phase_nor_the_work(seed: int) -> None:
    protocol = SyncSwitch("bsp@0.25,asp", total=1600, online="greedy", window=2, consecutive=2)
    decided = trace_of(protocol, RECOVERING, 400, seed)
    assert steps_and_pushes(decided) == (100, 1200, 1600)


def test_greedy_goes_and_comes_back_and_starts_all_together_each_time() -> None:
    protocol = SyncSwitch("bsp@0.25,asp", total=1600, online="greedy", window=2, consecutive=2)
    kinds = [event.fate for event in trace_of(protocol, RECOVERING, 400, seed=1) if event.pushed is not None]
    changes = [kind for kind, before in zip(kinds[1:], kinds, strict=False) if kind != before]
    assert len(changes) >= 5
    assert changes[-1] == "apply"


def test_every_detour_begins_with_a_rule_that_has_nothing_to_remember() -> None:
    protocol = SyncSwitch("bsp@0.5,dssp(lower=0,upper=4)", total=400, online="greedy", **QUICK)
    forgotten = detours = 0
    saved, empty = memory(protocol.rules[1]), memory(make("dssp"))
    for step in drive(protocol, Schedule(workers=3, speeds=(2, 3, 4), transient=0.4, iterations=80)):
        if step.decision.rebase and protocol.detour:
            detours += 1
            forgotten += saved != empty
            assert memory(protocol.rule) == empty
        saved = memory(protocol.rules[1])
    assert detours > 2
    assert forgotten > 0


def test_a_straggler_that_never_recovers_keeps_greedy_on_its_detour() -> None:
    protocol = SyncSwitch("bsp@0.5,asp", total=1600, online="greedy", window=2, consecutive=2)
    synchronous, asynchronous, pushes = steps_and_pushes(trace_of(protocol, PERSISTENT, 400))
    assert synchronous == 4
    assert (asynchronous, pushes) == (1600 - 16, 1600)


def test_elastic_makes_as_many_steps_without_the_straggler_and_lets_it_back_afterwards() -> None:
    protocol = SyncSwitch("bsp@0.25,asp", total=1600, online="elastic", window=2, consecutive=2)
    decided = trace_of(protocol, PERSISTENT, 400)
    synchronous, _, pushes = steps_and_pushes(decided)
    assert (synchronous, pushes) == (100, 1600)
    with_it = [event for event in decided if event.flush is not None and 3 in event.flushed]
    assert len(with_it) == 4
    assert {event.lr_scale for event in decided if event.flush} == {1.0, 0.75}
    assert sum(event.pushed == 3 and event.fate == "apply" for event in decided) > 100


def test_a_phase_with_stragglers_is_faster_when_something_is_done_about_them() -> None:
    def seconds(online: Online) -> float:
        protocol = SyncSwitch("bsp@0.5,asp", total=1600, online=online, window=2, consecutive=2)
        return simulate(protocol, PERSISTENT, iterations=400).result().seconds

    ignored, greedy, elastic = map(seconds, ("none", "greedy", "elastic"))
    assert greedy < 0.65 * ignored
    assert elastic < 0.65 * ignored


# -- online actions and when they end ------------------------------------------------------------------


@every_online
@given(schedule=schedules())
def test_no_online_action_once_the_last_phase_has_begun(online: Online, schedule: Schedule) -> None:
    protocol = SyncSwitch("bsp@0.5,bsp@0.6,asp", total=30, online=online, **QUICK)
    for step in drive(protocol, schedule):
        if protocol.at == 2 and not step.decision.rebase:
            assert not step.benched
            assert not step.decision.bench
            assert not step.decision.note


@pytest.mark.parametrize("online", ["greedy", "elastic"])
def test_nothing_is_done_about_workers_of_equal_speed(online: Online) -> None:
    for workers in (1, 2, 3, 8):
        protocol = SyncSwitch("bsp@0.9,asp", total=workers * 50, online=online, **QUICK)
        plain = SyncSwitch("bsp@0.9,asp", total=workers * 50)
        cluster = Cluster(workers=workers, compute=Fixed(0.1))
        assert trace_of(protocol, cluster, 50) == trace_of(plain, cluster, 50)


@given(schedule=schedules(workers=6), share=st.sampled_from([0.2, 0.5, 0.7, 1.0]))
def test_elastic_never_evicts_below_the_smallest_group(schedule: Schedule, share: float) -> None:
    protocol = SyncSwitch("bsp@0.8,asp", total=60, online="elastic", smallest_group=share, **QUICK)
    for step in drive(protocol, schedule):
        group, everybody = len(step.after), len(step.after) + len(step.benched)
        assert not step.benched or group >= ceil(share * everybody)
        assert not step.decision.bench or set(step.decision.bench) <= step.waited
        if share == 1.0:
            assert not step.benched


def test_elastic_evicts_the_slowest_first() -> None:
    pacer = started(SyncSwitch("bsp@0.9,asp", total=1000, online="elastic", **QUICK), 8)
    took = dict.fromkeys(range(8), 1.0) | {2: 6.0, 5: 9.0, 6: 5.0}
    last = rounds(pacer, 1, took)[0]
    assert last.bench == (5, 2, 6)
    assert "rank 2, 5, 6" in last.note
    assert set(last.release) == {0, 1, 3, 4, 7}
    assert set(pacer.clocks.benched) == {2, 5, 6}


def test_those_set_aside_come_back_when_too_few_are_left_or_the_phase_ends() -> None:
    def evicted() -> Pacer:
        pacer = started(SyncSwitch("bsp@0.5,asp", total=32, online="elastic", **QUICK), 4)
        assert rounds(pacer, 1, {0: 1.0, 1: 1.0, 2: 1.0, 3: 5.0})[0].bench == (3,)
        return pacer

    ended = rounds(evicted(), 3, {0: 1.0, 1: 1.0, 2: 1.0}, 5.0)
    assert [d.rebase for d in ended] == [False, False, True]
    assert set(ended[-1].release) == {0, 1, 2, 3}
    pacer = evicted()
    assert pacer.leave(0, 6.0).release == ()
    assert pacer.leave(1, 6.0).release == ()
    assert pacer.leave(2, 6.0).release == (3,)
    assert set(pacer.clocks.active) == {3}


def test_a_straggler_is_evicted_after_exactly_as_many_windows_as_set() -> None:
    protocol = SyncSwitch("bsp@0.9,asp", total=1000, online="elastic", window=3, consecutive=4)
    answers = rounds(started(protocol, 3), 13, {0: 1.0, 1: 1.0, 2: 2.0})
    assert [i for i, decision in enumerate(answers, 1) if decision.bench] == [12]


@given(schedule=schedules())
def test_without_deaths_or_joins_elastic_counts_a_step_of_the_group_as_one_of_all(schedule: Schedule) -> None:
    steady = Schedule(schedule.workers, schedule.seed, schedule.speeds, schedule.transient, 12)
    protocol = SyncSwitch("bsp@0.5,asp", total=12 * steady.workers, online="elastic", **QUICK)
    flushes = [s.decision for s in drive(protocol, steady) if s.decision.flush and s.clocks.pushes]
    assert len(flushes) == 6
    for decision in flushes:
        assert decision.lr_scale == pytest.approx(len(decision.flushed) / steady.workers)


def test_a_resumed_run_begins_in_the_phase_its_samples_say_once_the_total_is_known() -> None:
    """Workers have joined by then: nothing was judged yet, so no barrier ends the phase before."""
    pacer = Pacer(SyncSwitch("bsp@0.5,asp"))
    pacer.resume(10, samples=600, pushes=10)
    for worker in (0, 1):
        pacer.join(worker, 0.0)
    pacer.plan(1000)
    first = pacer.push(0, 1.0)
    assert (first.fate, first.release) == (Fate.APPLY, (0,))
