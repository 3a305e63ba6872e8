"""What holds for all protocols with a bound: how far apart workers start, what a read contains."""

from __future__ import annotations

import pytest
from hypothesis import given

from paceline.protocols import Pacing
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP, Preset
from paceline.protocols.paced.ssp import SSP
from support.drive import Schedule, drive
from support.schedules import schedules
from support.visibility import Visible

BOUNDED = [
    pytest.param(BSP, 0, id="bsp"),
    *(pytest.param(lambda s=s: SSP(staleness=s), s, id=f"ssp-{s}") for s in (0, 3)),
    *(
        pytest.param(lambda p=p, r=r: DSSP(lower=r[0], upper=r[1], preset=p), r[1], id=f"dssp-{p}-{r}")
        for p in ("bounded", "bounded_eager")
        for r in ((0, 2), (1, 4))
    ),
]
bounded = pytest.mark.parametrize(("protocol", "bound"), BOUNDED)
unbounded_presets = pytest.mark.parametrize("preset", ["figure2", "printed"])
ONE_SLOW = Schedule(workers=3, speeds=(1, 2, 40), transient=0.0, iterations=30)
"""One worker so slow that all others run into any bound."""


@bounded
@given(schedule=schedules())
def test_a_released_worker_is_at_most_the_bound_ahead_of_the_slowest(
    protocol: type[Pacing], bound: int, schedule: Schedule
) -> None:
    for step in drive(protocol(), schedule):
        gaps = [step.gap(worker) for worker in step.released]
        assert all(gap <= bound for gap in gaps)
        assert step.decision.gap == max(gaps, default=0)


@bounded
@given(schedule=schedules())
def test_every_iteration_starts_within_the_bound_and_every_push_comes_within_one_more(
    protocol: type[Pacing], bound: int, schedule: Schedule
) -> None:
    for step in drive(protocol(), schedule):
        if step.event == "join":
            assert step.gap(step.worker) <= bound
        if step.event == "push":
            assert step.gap(step.worker) <= bound + 1


@bounded
def test_the_bound_is_reached_at_the_start_and_passed_by_one_at_the_push(
    protocol: type[Pacing], bound: int
) -> None:
    steps = [step for step in drive(protocol(), ONE_SLOW) if step.after]
    assert max(step.gap(w) for step in steps for w in step.released) == bound
    assert max(step.gap(step.worker) for step in steps if step.event == "push") == bound + 1


@bounded
@given(schedule=schedules())
def test_a_read_at_clock_c_contains_every_update_up_to_c_minus_the_bound(
    protocol: type[Pacing], bound: int, schedule: Schedule
) -> None:
    weights = Visible()
    for step in drive(protocol(), schedule):
        weights.take(step)
        for worker in step.released:
            assert min(weights.applied.values()) >= step.after[worker] - bound


@pytest.mark.parametrize("protocol", [ASP, *(p.values[0] for p in BOUNDED), lambda: DSSP(1, 3, "figure2")])
@given(schedule=schedules())
def test_a_read_contains_all_of_the_readers_own_updates(protocol: type[Pacing], schedule: Schedule) -> None:
    weights = Visible()
    for step in drive(protocol(), schedule):
        weights.take(step)
        for worker in step.released:
            assert weights.applied[worker] == step.after[worker]


@bounded
@given(schedule=schedules())
def test_the_slowest_never_waits(protocol: type[Pacing], bound: int, schedule: Schedule) -> None:
    for step in drive(protocol(), schedule):
        assert all(step.gap(worker) > 0 for worker in step.waiting)


@unbounded_presets
@given(schedule=schedules())
def test_the_slowest_never_waits_without_a_bound_either(preset: Preset, schedule: Schedule) -> None:
    for step in drive(DSSP(lower=0, upper=3, preset=preset), schedule):
        assert all(step.gap(worker) > 0 for worker in step.waiting)


@pytest.mark.parametrize("protocol", [ASP, *(p.values[0] for p in BOUNDED)])
@given(schedule=schedules())
def test_the_slowest_clock_never_falls(protocol: type[Pacing], schedule: Schedule) -> None:
    slowest = 0
    for step in drive(protocol(), schedule):
        if step.after:
            assert step.clocks.slowest == step.slowest >= slowest
            slowest = step.slowest


@pytest.mark.parametrize("protocol", [ASP, *(p.values[0] for p in BOUNDED)])
@given(schedule=schedules())
def test_a_push_raises_the_slowest_clock_by_one_or_not_at_all(
    protocol: type[Pacing], schedule: Schedule
) -> None:
    for step in drive(protocol(), schedule):
        if step.event == "push":
            assert step.slowest - min(step.before.values()) in (0, 1)
