"""Hybrid SGD: a buffer, and a threshold that grows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Fate, Flush, Pacer
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.hybrid_sgd import HybridSGD
from paceline.protocols.settings import make
from support.drive import Schedule, Step, drive
from support.schedules import schedules

THRESHOLDS = ["step", "linear", "cosine", "exponential", "piecewise", "constant"]
both_waits = pytest.mark.parametrize("wait", ["in_buffer", "never"])
hybrids = st.builds(
    HybridSGD,
    threshold=st.sampled_from(THRESHOLDS),
    first=st.integers(1, 3),
    h=st.integers(1, 9),
    end=st.integers(1, 60),
    points=st.just("4:3,9:4,20:7"),
    count=st.sampled_from(["gradients", "flushes"]),
    reduce=st.sampled_from(["mean", "sum"]),
    wait=st.sampled_from(["in_buffer", "never"]),
)


def gradients_in(step: Step) -> int:
    """How many gradients the decision's step was made of: every one weighs 1."""
    return (step.decision.fate is Fate.APPLY) + int(sum(step.decision.flushed.values()))


def progress(protocol: HybridSGD, step: Step) -> int:
    """What the threshold was taken at: gradients with this one, or steps before this one."""
    steps = step.decision.version - bool(gradients_in(step))
    return step.clocks.pushes if protocol.count == "gradients" else steps


# Limits.


@both_waits
@given(schedule=schedules())
def test_a_constant_threshold_of_one_decides_as_asp(wait: Any, schedule: Schedule) -> None:
    hybrid = [step.decision for step in drive(HybridSGD("constant", wait=wait), schedule)]
    assert hybrid == [step.decision for step in drive(ASP(), schedule)]


@given(schedule=schedules())
def test_a_constant_threshold_of_all_workers_decides_as_bsp_but_for_one_alone(schedule: Schedule) -> None:
    for hybrid, bsp in zip(
        drive(HybridSGD("constant", first=99), schedule), drive(BSP(), schedule), strict=True
    ):
        assert (hybrid.event, hybrid.worker, hybrid.now) == (bsp.event, bsp.worker, bsp.now)
        assert (hybrid.released, hybrid.decision.version) == (bsp.released, bsp.decision.version)
        if hybrid.decision.fate is Fate.APPLY:
            assert bsp.decision.flushed == {bsp.worker: 1.0}
        else:
            assert hybrid.decision == bsp.decision


# The threshold.


@given(protocol=hybrids, workers=st.integers(1, 30))
def test_the_threshold_is_within_one_and_all_workers_and_never_falls(
    protocol: HybridSGD, workers: int
) -> None:
    needed = [protocol.needed(count, workers) for count in range(400)]
    assert all(1 <= each <= workers for each in needed)
    assert all(before <= after for before, after in pairwise(needed))
    assert needed[0] == min(protocol.first, workers)


@pytest.mark.parametrize(("first", "h", "workers"), [(1, 300, 25), (1, 500, 25), (4, 7, 10)])
def test_the_step_function_reaches_all_workers_exactly_after_h_for_each_missing_one(
    first: int, h: int, workers: int
) -> None:
    protocol, full = HybridSGD(first=first, h=h), (workers - first) * h
    assert protocol.needed(full - 1, workers) == workers - 1
    assert protocol.needed(full, workers) == protocol.needed(10 * full, workers) == workers


@pytest.mark.parametrize(
    ("settings", "at", "needed"),
    [
        ({}, [0, 299, 300, 599, 600], [1, 1, 2, 2, 3]),
        ({"h": 1}, [0, 1, 2, 3], [1, 2, 3, 4]),
        ({"threshold": "linear", "end": 100, "first": 2}, [0, 12, 13, 99, 100], [2, 2, 3, 9, 10]),
        ({"threshold": "cosine", "end": 90}, [0, 30, 45, 60, 89, 90], [1, 3, 5, 7, 9, 10]),
        ({"threshold": "exponential", "h": 10}, [0, 9, 10, 20, 30, 40, 10**6], [1, 1, 2, 4, 8, 10, 10]),
        ({"threshold": "piecewise", "points": "5:2,9:6"}, [0, 4, 5, 8, 9, 99], [1, 1, 2, 2, 6, 6]),
        ({"threshold": "constant", "first": 4}, [0, 10**6], [4, 4]),
    ],
    ids=["paper", "step", "linear", "cosine", "exponential", "piecewise", "constant"],
)
def test_thresholds_of_ten_workers(settings: dict[str, Any], at: list[int], needed: list[int]) -> None:
    assert [HybridSGD(**settings).needed(count, 10) for count in at] == needed


# The buffer.


@given(schedule=schedules(churn=False), protocol=hybrids)
def test_a_step_has_exactly_as_many_gradients_as_the_threshold_says(
    schedule: Schedule, protocol: HybridSGD
) -> None:
    for step in drive(protocol, schedule):
        needed = protocol.needed(progress(protocol, step), len(step.after))
        if step.event == "push" and gradients_in(step) and len(step.after) == schedule.workers:
            assert gradients_in(step) == needed
        if step.after:
            assert step.clocks.held < needed


@given(schedule=schedules(), protocol=hybrids)
def test_a_step_has_fewer_gradients_than_the_threshold_never(schedule: Schedule, protocol: HybridSGD) -> None:
    for step in drive(protocol, schedule):
        if gradients_in(step) and step.after:
            assert gradients_in(step) >= protocol.needed(progress(protocol, step), len(step.after))


@given(schedule=schedules(), protocol=hybrids)
def test_no_gradient_is_lost_or_taken_twice_and_none_is_left_in_the_end(
    schedule: Schedule, protocol: HybridSGD
) -> None:
    taken = 0
    for step in drive(protocol, schedule):
        taken += gradients_in(step)
        assert taken + step.clocks.held == step.clocks.pushes
        assert step.after or step.clocks.held == 0


@given(schedule=schedules(churn=False), protocol=hybrids.filter(lambda p: p.wait == "in_buffer"))
def test_who_waits_in_the_buffer_has_one_gradient_there_and_all_of_them_go_on_with_its_step(
    schedule: Schedule, protocol: HybridSGD
) -> None:
    for step in drive(protocol, schedule):
        assert set(step.decision.flushed.values()) <= {1.0}
        assert step.clocks.held == len(step.waiting)
        assert set(step.released) == (step.waited if gradients_in(step) else set())


@given(schedule=schedules(), protocol=hybrids.filter(lambda p: p.wait == "never"))
def test_who_does_not_wait_never_does(schedule: Schedule, protocol: HybridSGD) -> None:
    for step in drive(protocol, schedule):
        assert not step.waiting


def test_without_waiting_a_fast_worker_may_have_several_gradients_in_one_step() -> None:
    pacer = Pacer(HybridSGD("constant", first=3, wait="never"))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    assert pacer.push(0, 1.0).release == (0,)
    assert pacer.push(0, 2.0).release == (0,)
    last = pacer.push(1, 3.0)
    assert (last.flushed, last.version, last.release) == ({0: 2.0, 1: 1.0}, 1, (1,))


@pytest.mark.parametrize(
    ("reduce", "first", "kind"), [("sum", 2, "SUM"), ("sum", 3, "SUM"), ("mean", 2, "PART")]
)
@both_waits
def test_the_buffer_is_reduced_as_asked_also_when_it_holds_one_of_everybody(
    wait: Any, reduce: Any, first: int, kind: str
) -> None:
    schedule = Schedule(workers=3, iterations=6)
    protocol = HybridSGD("constant", first=first, reduce=reduce, wait=wait)
    steps = [step for step in drive(protocol, schedule) if step.decision.flushed and len(step.after) == 3]
    assert {step.decision.flush for step in steps} == {Flush[kind]}


@pytest.mark.parametrize(("count", "steps"), [("gradients", 3), ("flushes", 4)])
def test_the_threshold_grows_with_what_is_counted(count: Any, steps: int) -> None:
    pacer = Pacer(HybridSGD(h=2, count=count, wait="never"))
    for worker in range(9):
        pacer.join(worker, 0.0)
    made = [pacer.push(worker, 1.0).version for worker in range(7)]
    assert made[-1] == steps  # of 1, 2 and 3 (and 1 is waiting); of 1, 1, 2 and 2 (and 1 is waiting)


# Who comes and goes.


def test_a_death_lowers_what_is_needed_and_lets_the_others_go_on() -> None:
    pacer = Pacer(HybridSGD("constant", first=3))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    pacer.push(0, 1.0)
    pacer.push(1, 2.0)
    died = pacer.leave(2, 3.0)
    assert (died.release, died.flushed) == ((0, 1), {0: 1.0, 1: 1.0})


def test_a_gradient_left_by_a_dead_worker_adds_to_a_step_and_does_not_hasten_it() -> None:
    pacer = Pacer(HybridSGD("constant", first=2))
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    pacer.push(0, 1.0)
    pacer.leave(0, 2.0)
    assert pacer.push(1, 3.0).release == ()
    assert pacer.push(2, 4.0).flushed == {0: 1.0, 1: 1.0, 2: 1.0}


@both_waits
def test_an_unusable_gradient_holds_nobody_up(wait: Any) -> None:
    pacer = Pacer(HybridSGD("constant", first=2, wait=wait))
    pacer.join(0, 0.0)
    pacer.join(1, 0.0)
    pacer.push(0, 1.0, usable=False)
    assert 1 in pacer.push(1, 2.0).release
    assert pacer.clocks.waiting_count == 0


# Settings.


def test_settings_can_be_typed() -> None:
    typed = {"threshold": "piecewise", "first": "2", "points": "10:3,20:4", "wait": "never"}
    assert make("hybrid_sgd", typed) == HybridSGD("piecewise", 2, points="10:3,20:4", wait="never")


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"first": 0}, "first must be >= 1, got 0"),
        ({"h": 0}, "h must be >= 1, got 0"),
        ({"end": -1}, "end must be >= 1, got -1"),
        ({"points": ""}, "points='' are not"),
        ({"points": "1:2:3"}, "points='1:2:3' are not"),
        ({"points": "1:x"}, "points='1:x' are not"),
        ({"threshold": "piecewise", "points": "1:3,5:2"}, "points='1:3,5:2' let the threshold fall"),
        ({"threshold": "piecewise", "points": "1:2", "first": 3}, "it begins with first=3"),
    ],
)
def test_impossible_settings_are_refused_with_their_value(settings: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        HybridSGD(**settings)


@pytest.mark.parametrize(("lr_scale", "factor"), [("K", 1.0), ("sqrt_K", 2**-0.5), ("1", 0.5)])
def test_a_step_of_two_gradients_is_scaled_as_asked(lr_scale: Any, factor: float) -> None:
    protocol = HybridSGD("constant", first=2, reduce="mean", lr_scale=lr_scale)
    steps = [step.decision for step in drive(protocol, Schedule(workers=3, iterations=6))]
    (scale,) = {decision.lr_scale for decision in steps if decision.gradients == 2}
    assert scale == pytest.approx(factor)
