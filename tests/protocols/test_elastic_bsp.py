"""Elastic Bulk Synchronous Parallel: supersteps, quotas, and the algorithm against a plain second writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Decision, Fate, Flush, Pacer
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.elastic_bsp import ElasticBSP
from paceline.protocols.rules.zipline import SEARCHES, zipline
from support.drive import Schedule, Step, drive
from support.reference_elastic_bsp import ReferenceElasticBSP
from support.schedules import schedules

MONITORS = ["free", "carry_over", "off"]
every_monitor = pytest.mark.parametrize("monitor", MONITORS)
at_the_barrier = pytest.mark.parametrize("monitor", ["carry_over", "off"])
modes = st.fixed_dictionaries(
    {
        "lookahead": st.integers(1, 3),
        "monitor": st.sampled_from(MONITORS),
        "barrier_update": st.sampled_from(["aggregate", "immediate"]),
        "max_superstep": st.sampled_from([0, 2, 5]),
    }
)
ALIKE = Schedule(workers=4, speeds=(1,), transient=0.0, iterations=30)
"""Equal constant speeds."""


def told(plain: ReferenceElasticBSP, step: Step) -> set[int]:
    if step.event == "join":
        return plain.join(step.worker, step.now)
    if step.event == "push":
        return plain.push(step.worker, step.now)
    return plain.leave(step.worker, step.now)


@settings(max_examples=200)
@given(schedule=schedules(workers=3, iterations=20), mode=modes)
def test_decides_as_a_plain_second_writing(schedule: Schedule, mode: dict[str, Any]) -> None:
    plain = ReferenceElasticBSP(**mode)
    for step in drive(ElasticBSP(**mode), schedule):
        assert set(step.released) == told(plain, step)


# Limits.


@at_the_barrier
@given(schedule=schedules())
def test_a_lookahead_of_one_without_monitoring_decides_as_bsp(monitor: Any, schedule: Schedule) -> None:
    elastic = [step.decision for step in drive(ElasticBSP(1, monitor), schedule)]
    assert elastic == [step.decision for step in drive(BSP(), schedule)]


@at_the_barrier
@given(schedule=schedules())
def test_with_immediate_updates_it_still_releases_exactly_what_bsp_releases(
    monitor: Any, schedule: Schedule
) -> None:
    protocol = ElasticBSP(1, monitor, "immediate")
    elastic = [(step.event, step.worker, step.released) for step in drive(protocol, schedule)]
    assert elastic == [(step.event, step.worker, step.released) for step in drive(BSP(), schedule)]


@at_the_barrier
def test_equal_constant_speeds_without_monitoring_are_bsp_whatever_the_lookahead(monitor: Any) -> None:
    elastic = [step.decision for step in drive(ElasticBSP(monitor=monitor), ALIKE)]
    assert elastic == [step.decision for step in drive(BSP(), ALIKE)]


def test_equal_constant_speeds_make_one_iteration_after_the_two_monitored_ones() -> None:
    barriers = [step for step in drive(ElasticBSP(), ALIKE) if len(step.released) > 1]
    assert [set(step.after.values()) for step in barriers] == [{n} for n in range(3, 31, 3)]


@contextmanager
def quotas_of(search: Any) -> Iterator[None]:
    with patch.dict(SEARCHES, zipline=search):
        yield


@given(schedule=schedules(churn=False))
def test_endless_quotas_decide_as_asp(schedule: Schedule) -> None:
    with quotas_of(lambda ends: [10**6] * len(ends)):
        elastic = [step.decision for step in drive(ElasticBSP(), schedule)]
    assert elastic == [step.decision for step in drive(ASP(), schedule)]


# Supersteps.


@settings(max_examples=100)
@given(schedule=schedules(), mode=modes)
def test_all_start_a_superstep_together_and_nobody_before(schedule: Schedule, mode: dict[str, Any]) -> None:
    for step in drive(ElasticBSP(**mode), schedule):
        assert set(step.released) in ({step.worker}, set(), step.after.keys())
        if step.waited - {step.worker} & set(step.released):
            assert set(step.released) == step.after.keys()


@settings(max_examples=100)
@given(schedule=schedules(), mode=modes)
def test_only_the_last_push_of_a_superstep_is_held_and_the_barrier_makes_one_step_of_them(
    schedule: Schedule, mode: dict[str, Any]
) -> None:
    together = mode["barrier_update"] == "aggregate"
    for step in drive(ElasticBSP(**mode), schedule):
        if step.event == "push" and len(step.after) > 1:
            last = step.released != (step.worker,)
            assert step.decision.fate is (Fate.HOLD if last and together else Fate.APPLY)
        if len(step.after) > 1 and set(step.released) == step.after.keys() and together:
            assert step.decision.flush is Flush.MEAN
            assert step.decision.flushed.keys() >= step.after.keys()
        if not together:
            assert not step.decision.flushed


def pushes_by_superstep(steps: Iterator[Step]) -> Iterator[dict[int, int]]:
    """Of each superstep, how often each worker that was there at its end pushed in its present life."""
    made: dict[int, int] = {}
    for step in steps:
        if step.event == "join":
            made[step.worker] = 0
        elif step.event == "push":
            made[step.worker] += 1
        else:
            del made[step.worker]
        if step.decision.flush is not None:
            yield dict(made)
            made = dict.fromkeys(made, 0)


@at_the_barrier
@given(schedule=schedules(iterations=30), lookahead=st.integers(1, 5))
def test_without_monitoring_nobody_makes_more_than_lookahead_iterations_in_a_superstep(
    monitor: Any, schedule: Schedule, lookahead: int
) -> None:
    for made in pushes_by_superstep(drive(ElasticBSP(lookahead, monitor), schedule)):
        assert all(1 <= count <= lookahead for count in made.values())


@at_the_barrier
@pytest.mark.parametrize("lookahead", [2, 4])
def test_lookahead_iterations_do_occur(monitor: Any, lookahead: int) -> None:
    schedule = Schedule(workers=2, speeds=(1, 30), transient=0.0, iterations=40)
    supersteps = list(pushes_by_superstep(drive(ElasticBSP(lookahead, monitor), schedule)))
    assert max(made.get(0, 0) for made in supersteps) == lookahead


@every_monitor
@given(schedule=schedules(iterations=30), cap=st.integers(2, 6))
def test_nobody_makes_more_than_max_superstep_iterations_in_a_superstep(
    monitor: Any, schedule: Schedule, cap: int
) -> None:
    for made in pushes_by_superstep(drive(ElasticBSP(9, monitor, max_superstep=cap), schedule)):
        assert all(count <= cap for count in made.values())


@pytest.mark.parametrize("cap", [2, 5])
def test_max_superstep_iterations_do_occur(cap: int) -> None:
    schedule = Schedule(workers=2, speeds=(1, 30), transient=0.0, iterations=40)
    supersteps = list(pushes_by_superstep(drive(ElasticBSP(max_superstep=cap), schedule)))
    assert max(made.get(0, 0) for made in supersteps) == cap


class Spied(ElasticBSP):
    """Tells what had been pushed in the superstep at each prediction, and the quotas chosen then."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.predictions: list[tuple[dict[int, int], dict[int, int]]] = []

    def _predict(self, clocks: Any) -> dict[int, int]:
        stops, made = super()._predict(clocks), dict(self.since)
        self.predictions.append((made, {worker: stop - made[worker] for worker, stop in stops.items()}))
        return stops


@given(schedule=schedules(churn=False, iterations=30), lookahead=st.integers(1, 6))
def test_a_superstep_has_the_monitored_pushes_and_the_quotas_and_no_others(
    schedule: Schedule, lookahead: int
) -> None:
    protocol, left, supersteps = Spied(lookahead=lookahead), False, []
    for step in drive(protocol, schedule):
        left = left or step.event == "finished"
        if not left and len(step.after) > 1 and set(step.released) == step.after.keys():
            supersteps.append(dict(step.after))
    done = dict.fromkeys(range(schedule.workers), 0)
    for clocks, (made, quotas) in zip(supersteps, protocol.predictions, strict=False):
        assert all(1 <= quota <= lookahead for quota in quotas.values())
        assert clocks == {worker: done[worker] + made[worker] + quotas[worker] for worker in done}
        done = clocks


# Predictions.


def constant(protocol: ElasticBSP, intervals: list[float], until: float) -> Iterator[tuple[float, Decision]]:
    """Workers that always take exactly as long, from one start."""
    pacer = Pacer(protocol)
    queue: list[tuple[float, int]] = []
    for worker, interval in enumerate(intervals):
        pacer.join(worker, 0.0)
        heappush(queue, (interval, worker))
    while queue[0][0] <= until:
        now, worker = heappop(queue)
        decision = pacer.push(worker, now)
        yield now, decision
        for released in decision.release:
            heappush(queue, (now + intervals[released], released))


@every_monitor
@given(ticks=st.lists(st.integers(1, 12), min_size=2, max_size=4), lookahead=st.integers(1, 6))
def test_with_exact_constant_intervals_the_first_to_arrive_waits_as_long_as_predicted_and_no_longer_than_bsp(
    monitor: Any, ticks: list[int], lookahead: int
) -> None:
    predicted: list[tuple[float, float]] = []
    waited: list[float] = []

    def spy(ends: list[list[float]]) -> list[int]:
        quotas = zipline(ends)
        chosen = [row[quota - 1] for row, quota in zip(ends, quotas, strict=True)]
        predicted.append((max(chosen) - min(chosen), max(ends)[0] - min(ends)[0]))
        return quotas

    arrived: list[float] = []
    with quotas_of(spy):
        for now, decision in constant(ElasticBSP(lookahead, monitor), [t / 8 for t in ticks], 40.0):
            if decision.fate is Fate.HOLD:
                arrived.append(now)
            if len(decision.release) > 1:
                waited.append(now - arrived[0])
                arrived.clear()
    rounds_before = {"free": 0, "carry_over": 1, "off": len(waited)}[monitor]  # `off` counts waits as work
    for wait, (closest, first) in zip(waited[rounds_before:], predicted, strict=False):
        assert wait == closest <= first


def test_carried_over_intervals_leave_the_wait_out() -> None:
    supersteps = [d for _, d in constant(ElasticBSP(5, "carry_over"), [1.0, 3.0], 30.0) if len(d.release) > 1]
    assert [d.version for d in supersteps] == [1, *range(4, 29, 3)]  # one round to learn, then 3 and 1


@pytest.mark.parametrize("seconds", [0.0, 1000.0], ids=["at-zero", "later"])
@pytest.mark.parametrize("scale", [1.0, 0.25], ids=["slow", "fast"])
def test_a_push_that_is_overdue_is_expected_now(seconds: float, scale: float) -> None:
    pacer = Pacer(ElasticBSP(lookahead=9))
    pacer.join(0, seconds)
    pacer.join(1, seconds)
    for now, worker in [(1, 0), (2, 0), (3, 1), (6, 1)]:  # at 6, worker 0 is overdue since 3
        assert pacer.push(worker, seconds + now * scale).release == (worker,)
    released = [pacer.push(0, seconds + now * scale).release for now in (6, 7, 8, 9)]
    assert released == [(0,), (0,), (0,), ()]  # 6, 7, 8, 9 against 9, 12, ...
    assert set(pacer.push(1, seconds + 9 * scale).release) == {0, 1}


# Who comes and goes.


def predicted() -> Pacer:
    """Three equal workers after their monitored pushes; each has one iteration to go."""
    pacer = Pacer(ElasticBSP())
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    for now in (1.0, 2.0):
        for worker in (0, 1, 2):
            assert pacer.push(worker, now).release == (worker,)
    return pacer


def test_the_death_of_whom_all_wait_for_ends_the_superstep() -> None:
    pacer = predicted()
    assert pacer.push(0, 3.0).release == ()
    assert pacer.push(1, 3.0).release == ()
    ended = pacer.leave(2, 4.0)
    assert set(ended.release) == {0, 1}
    assert ended.flushed == {0: 1.0, 1: 1.0}


def test_the_death_of_whom_nobody_has_seen_twice_ends_the_monitoring() -> None:
    pacer = Pacer(ElasticBSP())
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    for now in (1.0, 2.0):
        for worker in (0, 1):
            pacer.push(worker, now)
    assert pacer.leave(2, 2.5).release == ()
    assert pacer.push(0, 3.0).release == ()
    assert set(pacer.push(1, 3.0).release) == {0, 1}


def test_who_joins_within_a_predicted_superstep_waits_after_its_first_push() -> None:
    pacer = predicted()
    pacer.join(3, 2.5)
    for worker in (0, 1, 2):
        assert pacer.push(worker, 3.0).release == ()
    assert set(pacer.push(3, 3.5).release) == {0, 1, 2, 3}


def test_who_comes_back_has_neither_quota_nor_interval_of_its_earlier_life() -> None:
    pacer = predicted()
    pacer.leave(0, 2.25)
    pacer.join(0, 2.5)
    assert pacer.push(0, 2.75).release == ()
    pacer.push(1, 3.0)
    assert set(pacer.push(2, 3.0).release) == {0, 1, 2}


def test_who_comes_back_while_monitored_has_to_be_seen_twice_again() -> None:
    pacer = Pacer(ElasticBSP())
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)
    pacer.push(0, 2.0)
    pacer.leave(0, 2.5)
    pacer.join(0, 3.0)
    for now, worker in [(4.0, 1), (5.0, 1), (6.0, 1), (7.0, 0), (8.0, 1), (9.0, 0)]:
        assert pacer.push(worker, now).release == (worker,)
    assert pacer.push(1, 10.0).release == ()


def test_who_comes_back_has_all_iterations_of_a_superstep_again() -> None:
    pacer = Pacer(ElasticBSP(max_superstep=3))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)
    pacer.push(0, 2.0)
    pacer.leave(0, 2.5)
    pacer.join(0, 3.0)
    assert [pacer.push(0, now).release for now in (4.0, 5.0, 6.0)] == [(0,), (0,), ()]


# Settings.


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"lookahead": 0}, "lookahead must be >= 1, got 0"),
        ({"max_superstep": 1}, "max_superstep must be >= 2 with monitor=free, got 1"),
        ({"max_superstep": -1, "monitor": "off"}, "max_superstep must be >= 1 with monitor=off, got -1"),
    ],
)
def test_impossible_settings_are_refused_with_their_value(settings: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        ElasticBSP(**settings)


def test_the_smallest_possible_settings_are_taken() -> None:
    assert ElasticBSP(lookahead=1, max_superstep=2).max_superstep == 2
    assert ElasticBSP(monitor="off", max_superstep=1).max_superstep == 1


@pytest.mark.parametrize("search", ["grid", "full_grid"])
def test_the_heuristics_can_be_chosen_and_choose_differently(search: Any) -> None:
    schedule = Schedule(workers=5, seed=2, speeds=(3, 5, 8, 2, 7), iterations=30)
    exact, scanned = (
        [step.decision for step in drive(ElasticBSP(search=each), schedule)] for each in ("zipline", search)
    )
    assert exact != scanned
