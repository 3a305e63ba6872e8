"""Stale Synchronous Parallel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Pacer
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.ssp import SSP
from support.drive import Schedule, drive
from support.schedules import schedules

staleness_values = pytest.mark.parametrize("staleness", [0, 1, 4])


@staleness_values
def test_a_worker_starts_exactly_staleness_iterations_more_than_one_that_does_nothing(
    staleness: int,
) -> None:
    pacer = Pacer(SSP(staleness=staleness))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    for clock in range(1, staleness + 1):
        assert pacer.push(0, float(clock)).release == (0,)
    assert pacer.push(0, staleness + 1.0).release == ()
    assert set(pacer.push(1, staleness + 2.0).release) == {0, 1}


@staleness_values
@given(schedule=schedules())
def test_a_waiting_worker_is_released_at_the_first_moment_it_may_run(
    staleness: int, schedule: Schedule
) -> None:
    for step in drive(SSP(staleness=staleness), schedule):
        assert all(step.gap(worker) > staleness for worker in step.waiting)


@given(schedule=schedules())
def test_zero_staleness_releases_exactly_what_bsp_releases(schedule: Schedule) -> None:
    ssp = [(step.event, step.worker, step.released) for step in drive(SSP(staleness=0), schedule)]
    bsp = [(step.event, step.worker, step.released) for step in drive(BSP(), schedule)]
    assert ssp == bsp


@given(schedule=schedules())
def test_staleness_of_all_iterations_or_more_decides_as_asp(schedule: Schedule) -> None:
    total = schedule.iterations * (1 + len(schedule.joins))
    ssp = [step.decision for step in drive(SSP(staleness=total), schedule)]
    assert ssp == [step.decision for step in drive(ASP(), schedule)]


@given(schedule=schedules(churn=False), staleness=st.integers(0, 4))
def test_a_gradient_is_at_most_p_minus_one_times_two_s_plus_one_steps_old(
    schedule: Schedule, staleness: int
) -> None:
    for step in drive(SSP(staleness=staleness), schedule):
        assert step.decision.staleness <= (schedule.workers - 1) * (2 * staleness + 1)


def test_the_oldest_gradient_possible_does_occur() -> None:
    pacer = Pacer(SSP(staleness=1))
    for worker in (0, 1):
        pacer.join(worker, 0.0)
    pacer.push(1, 1.0)  # 1 reads at clock 1, which is staleness ahead of 0
    for now in (2.0, 3.0, 4.0):
        pacer.push(0, now)  # 0 goes from one behind to two ahead, and waits
    assert pacer.push(1, 5.0).staleness == 3


def test_a_worker_that_died_waiting_and_came_back_does_not_start_the_iteration_it_was_refused() -> None:
    pacer = Pacer(SSP(staleness=0))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    assert pacer.push(0, 1.0).release == ()
    pacer.leave(0, 2.0)
    pacer.join(0, 3.0)
    assert pacer.clocks.gap(0) == 0
    assert pacer.push(0, 4.0).release == ()


def test_the_death_of_the_slowest_frees_whom_it_held_back() -> None:
    pacer = Pacer(SSP(staleness=0))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)
    assert pacer.leave(1, 2.0).release == (0,)


def test_negative_staleness_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigError, match="-1"):
        SSP(staleness=-1)
    assert SSP(staleness=0).staleness == 0
