"""Dynamic Stale Synchronous Parallel: ranges, presets, and the algorithm against a plain second writing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocols import Pacer
from paceline.protocols.core.base import memory, restore
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP, Preset
from paceline.protocols.paced.ssp import SSP
from support.drive import Schedule, Step, drive
from support.reference_dssp import ReferenceDSSP
from support.schedules import schedules

READINGS = {
    "bounded": ReferenceDSSP(0, 0),
    "bounded_eager": ReferenceDSSP(0, 0, next_push=True),
    "figure2": ReferenceDSSP(0, 0, bounded=False, next_push=True),
    "printed": ReferenceDSSP(0, 0, exact=False, bounded=False),
}
presets = pytest.mark.parametrize("preset", list(READINGS))
ranges = st.tuples(st.integers(0, 3), st.integers(0, 6)).map(lambda r: (r[0], r[0] + r[1]))
RATIO_TWO = Schedule(workers=2, speeds=(8, 16), transient=0.0, iterations=60)
"""A persistently slow worker."""
SLOW_PAIR = Schedule(workers=3, speeds=(2, 16, 16), transient=0.0, iterations=30)


def reference(preset: Preset, lower: int, upper: int) -> ReferenceDSSP:
    reading = READINGS[preset]
    return ReferenceDSSP(lower, upper, reading.exact, reading.bounded, reading.next_push)


def told(reference: ReferenceDSSP, step: Step) -> set[int]:
    if step.event == "join":
        return reference.join(step.worker)
    if step.event == "push":
        return reference.push(step.worker, step.now)
    return reference.leave(step.worker)


@presets
@settings(max_examples=150)
@given(schedule=schedules(iterations=20), limits=ranges)
def test_decides_as_the_papers_pseudo_code(
    preset: Preset, schedule: Schedule, limits: tuple[int, int]
) -> None:
    plain = reference(preset, *limits)
    for step in drive(DSSP(*limits, preset), schedule):
        assert set(step.released) == told(plain, step)


@pytest.mark.parametrize("preset", ["bounded", "bounded_eager", "printed"])
@given(schedule=schedules(), staleness=st.integers(0, 4))
def test_lower_equal_to_upper_decides_event_for_event_as_ssp(
    preset: Preset, schedule: Schedule, staleness: int
) -> None:
    dssp = [step.decision for step in drive(DSSP(staleness, staleness, preset), schedule)]
    assert dssp == [step.decision for step in drive(SSP(staleness), schedule)]


@given(schedule=schedules(churn=False, workers=2), staleness=st.integers(0, 4))
def test_figure2_with_lower_equal_to_upper_decides_as_ssp_for_two_workers(
    schedule: Schedule, staleness: int
) -> None:
    """There is one worker to wait for, so its next push is the one that SSP waits for."""
    dssp = [step.decision for step in drive(DSSP(staleness, staleness, "figure2"), schedule)]
    assert dssp == [step.decision for step in drive(SSP(staleness), schedule)]


@pytest.mark.parametrize("staleness", [0, 2])
def test_figure2_with_lower_equal_to_upper_is_not_ssp_for_three(staleness: int) -> None:
    """Worker 0 is let go by the one slow worker it waits for, though the other is still where it was."""
    pacer = Pacer(DSSP(staleness, staleness, "figure2"))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    for now in range(staleness):
        assert pacer.push(0, float(now)).release == (0,)
    assert pacer.push(0, 10.0).release == ()
    slow = pacer.clocks.laggard()
    assert pacer.push(slow, 11.0).gap == staleness + 1
    assert max(step.decision.gap for step in drive(DSSP(1, 1, "figure2"), SLOW_PAIR)) > 2


@given(schedule=schedules())
def test_a_range_of_zero_to_zero_releases_exactly_what_bsp_releases(schedule: Schedule) -> None:
    dssp = [(step.worker, step.released) for step in drive(DSSP(0, 0), schedule)]
    assert dssp == [(step.worker, step.released) for step in drive(BSP(), schedule)]


@presets
@given(schedule=schedules())
def test_lower_of_all_iterations_or_more_decides_as_asp(preset: Preset, schedule: Schedule) -> None:
    total = schedule.iterations * (1 + len(schedule.joins))
    dssp = [step.decision for step in drive(DSSP(total, total + 12, preset), schedule)]
    assert dssp == [step.decision for step in drive(ASP(), schedule)]


@presets
@given(schedule=schedules(), limits=ranges)
def test_nobody_within_lower_ever_waits(preset: Preset, schedule: Schedule, limits: tuple[int, int]) -> None:
    for step in drive(DSSP(*limits, preset), schedule):
        assert all(step.gap(worker) > limits[0] for worker in step.waiting)


@pytest.mark.parametrize("preset", ["bounded", "bounded_eager"])
@given(schedule=schedules(iterations=20), limits=ranges)
def test_bounded_presets_never_release_beyond_upper(
    preset: Preset, schedule: Schedule, limits: tuple[int, int]
) -> None:
    for step in drive(DSSP(*limits, preset), schedule):
        assert step.decision.gap <= limits[1]
        assert step.event != "push" or step.gap(step.worker) <= limits[1] + 1


@pytest.mark.parametrize("preset", ["figure2", "printed"])
def test_unbounded_presets_do_exceed_upper(preset: Preset) -> None:
    assert max(step.decision.gap for step in drive(DSSP(1, 3, preset), RATIO_TWO)) > 3


@pytest.mark.parametrize("preset", ["bounded", "bounded_eager"])
def test_bounded_presets_go_as_far_as_upper(preset: Preset) -> None:
    assert max(step.decision.gap for step in drive(DSSP(1, 3, preset), RATIO_TWO)) == 3


@given(schedule=schedules(churn=False), limits=ranges)
def test_figure2_ends_a_wait_at_the_latest_with_the_next_push_of_whom_it_waits_for(
    schedule: Schedule, limits: tuple[int, int]
) -> None:
    awaited: dict[int, int] = {}
    for step in drive(DSSP(*limits, "figure2"), schedule):
        ended = {worker for worker, slow in awaited.items() if slow == step.worker}
        if step.event == "push":
            assert ended <= set(step.released)
        for worker in step.released:
            awaited.pop(worker, None)
        if step.event == "push" and step.worker in step.waiting:
            awaited[step.worker] = step.clocks.laggard()


@pytest.mark.parametrize("preset", ["bounded_eager", "figure2"])
def test_who_waits_for_a_worker_that_dies_waits_for_the_next_slowest_instead(preset: Preset) -> None:
    pacer = Pacer(DSSP(0, 2, preset))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    assert pacer.push(0, 1.0).release == ()  # nobody's interval is known: no grant, 0 waits for 2
    assert pacer.leave(2, 2.0).release == ()
    assert pacer.push(1, 3.0).release == (0, 1)


@pytest.mark.parametrize("preset", ["bounded_eager", "figure2"])
def test_a_wait_of_an_earlier_life_does_not_end_one_of_a_later_life(preset: Preset) -> None:
    pacer = Pacer(DSSP(0, 2, preset))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0)  # waits for 1
    pacer.leave(0, 2.0)
    pacer.join(0, 3.0)
    pacer.join(2, 3.0)
    assert pacer.push(0, 4.0).release == ()  # waits for 2
    assert pacer.push(1, 5.0).release == ()
    assert set(pacer.push(2, 6.0).release) == {0, 1, 2}


def test_grants_remembered_from_a_wider_range_do_not_carry_a_worker_past_a_narrower_upper() -> None:
    wide = DSSP(lower=1, upper=20)
    wide.grants[0] = 15
    narrow = DSSP(lower=1, upper=4)
    restore(narrow, memory(wide))
    pacer = Pacer(narrow)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    released = [pacer.push(0, float(now)).release for now in range(1, 6)]
    assert released == [(0,)] * 4 + [()]


def test_who_left_and_came_back_has_no_grant_left() -> None:
    protocol = DSSP(lower=0, upper=9)
    pacer = Pacer(protocol)
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    protocol.grants[0] = 5
    pacer.leave(0, 1.0)
    pacer.join(0, 2.0)
    assert pacer.push(0, 3.0).release == ()


@pytest.mark.parametrize(
    ("preset", "upper", "schedule"),
    [
        ("bounded_eager", 2, Schedule(5, 4493, (5, 1), 0.4, 3, ((0, 0), (36, 6)), ((0, 6),))),
        ("figure2", 1, Schedule(3, 4114, (1, 8, 4), 0.1, 5, ((36, 1),), ((13, 5),))),
    ],
)
def test_a_worker_that_came_to_wait_for_itself_is_released_once(
    preset: Preset, upper: int, schedule: Schedule
) -> None:
    for step in drive(DSSP(lower=0, upper=upper, preset=preset), schedule):
        assert len(step.released) == len(set(step.released))


def test_what_it_remembers_can_be_written_as_json_and_read_again() -> None:
    rule = DSSP()
    rule.grants, rule.waits_for, rule.awaited_by = {0: 2}, {1: 5}, {5: [1]}
    saved = memory(rule)
    assert json.loads(json.dumps(saved)) == saved
    restore(again := DSSP(), saved)
    assert (again.grants, again.waits_for, again.awaited_by) == ({0: 2}, {1: 5}, {5: [1]})
