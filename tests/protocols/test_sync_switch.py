"""Sync-Switch: phases, the barrier between them, and what happens while the work is unknown."""

from __future__ import annotations

from math import floor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import Decision, Fate, Flush, Pacer, Pacing
from paceline.protocols.core.base import memory, restore
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.ssp import SSP
from paceline.protocols.paced.sync_switch import Momentum, Online, SyncSwitch
from paceline.protocols.settings import make
from support.drive import Schedule, drive
from support.rounds import rounds, started
from support.schedules import schedules
from support.variants import label, variants

every_momentum = pytest.mark.parametrize(
    "momentum", ["keep", "zero", "scaled", "two_stage", "double", "linear"]
)
every_online = pytest.mark.parametrize("online", ["none", "greedy", "elastic"])
QUICK: dict[str, Any] = {"window": 1, "consecutive": 1}
"""Looks for stragglers after every round, and believes the first look."""


def decisions(protocol: Pacing, schedule: Schedule) -> list[Decision]:
    return [step.decision for step in drive(protocol, schedule)]


# -- the two ends, and one phase alone ---------------------------------------------------------


@every_online
@given(schedule=schedules())
def test_a_share_of_one_is_bsp_event_for_event(online: Online, schedule: Schedule) -> None:
    protocol = SyncSwitch("bsp@1,asp", total=20, online=online, momentum="scaled", **QUICK)
    assert decisions(protocol, schedule) == decisions(BSP(), schedule)


@every_online
@given(schedule=schedules())
def test_a_share_of_zero_is_asp_event_for_event(online: Online, schedule: Schedule) -> None:
    protocol = SyncSwitch("bsp@0,asp", total=20, online=online, momentum="scaled", **QUICK)
    assert decisions(protocol, schedule) == decisions(ASP(), schedule)


NO_PHASES = {
    "phases",
    "points",
    "form",
}  # lists have no place within a list; who decides himself ends no phase
ALONE = [v for v in variants() if v[0] != "sync_switch" and not NO_PHASES & v[1].keys()]


@pytest.mark.parametrize("variant", ALONE, ids=label)
@given(schedule=schedules())
def test_one_phase_decides_as_its_protocol(variant: tuple[str, dict[str, Any]], schedule: Schedule) -> None:
    name, settings = variant
    inside = ",".join(f"{key}={value}" for key, value in settings.items())
    protocol = SyncSwitch(f"{name}({inside})", total=20)
    assert decisions(protocol, schedule) == decisions(make(name, settings), schedule)


@every_momentum
@pytest.mark.parametrize("share", ["0", "0.0625", "0.3", "0.5", "0.99", "1"])
def test_with_one_worker_every_share_is_the_same_run(share: str, momentum: Momentum) -> None:
    def run(protocol: Pacing) -> list[Any]:
        kept = ("number", "release", "read", "staleness", "version", "gap")
        steps = drive(protocol, Schedule(workers=1, iterations=40))
        return [(step.event, step.now, *(getattr(step.decision, name) for name in kept)) for step in steps]

    protocol = SyncSwitch(f"bsp@{share},asp", total=40, momentum=momentum)
    assert run(protocol) == run(BSP()) == run(ASP())
    assert protocol.factor == (0.0 if momentum == "zero" and share not in ("0", "1") else 1.0)


# -- the barrier --------------------------------------------------------------------------------

PLANS = ["bsp@0.4,asp", "asp@0.4,bsp", "asp@0.3,ssp(staleness=1)@0.7,bsp", "dssp(lower=0,upper=2)@0.5,asp"]
PLANS += ["hybrid_sgd(first=3,threshold=constant)@0.5,asp", "backup_bsp@0.5,bsp", "elastic_bsp@0.5,psp"]
PLANS += ["psp@0.5,elastic_bsp(lookahead=3)", "bounded_ps(resync=2)@0.5,bsp", "bsp@12,asp@24,bsp"]
every_plan = pytest.mark.parametrize("plan", PLANS)


@every_plan
@given(schedule=schedules())
def test_all_start_a_phase_together_with_equal_clocks_on_the_same_weights(
    plan: str, schedule: Schedule
) -> None:
    for step in drive(SyncSwitch(plan, total=30), schedule):
        if step.decision.rebase:
            assert set(step.released) == step.after.keys()
            assert step.waited == step.after.keys()
            assert len(set(step.after.values())) <= 1
            assert step.clocks.held == 0


@every_plan
@given(schedule=schedules())
def test_a_switch_makes_no_step_of_its_own(plan: str, schedule: Schedule) -> None:
    version = held = 0
    for step in drive(SyncSwitch(plan, total=30), schedule):
        made = step.decision.version - version
        if step.decision.rebase:  # the last push, and what gradients the old rule had gathered
            has = held + (step.decision.fate is Fate.HOLD)
            assert made == (step.decision.fate is Fate.APPLY) + bool(has)
        version, held = step.decision.version, step.clocks.held


@every_plan
@given(schedule=schedules())
def test_while_a_phase_ends_nobody_is_released(plan: str, schedule: Schedule) -> None:
    protocol = SyncSwitch(plan, total=30)
    for step in drive(protocol, schedule):
        if protocol.leaving:
            assert not step.released
            assert step.computing


@given(schedule=schedules())
def test_until_the_switch_it_decides_as_the_first_protocol(schedule: Schedule) -> None:
    switching = decisions(SyncSwitch("ssp@0.5,bsp", total=20), schedule)
    for mine, plain in zip(switching, decisions(SSP(), schedule), strict=False):
        if mine.rebase or mine.release != plain.release:  # the phase ends
            return
        assert mine == plain


@given(schedule=schedules())
def test_a_bound_holds_from_the_switch_on_whatever_the_clocks_were_before(schedule: Schedule) -> None:
    protocol = SyncSwitch("asp@0.4,ssp(staleness=1)", total=30)
    for step in drive(protocol, schedule):
        if protocol.at == 1:
            assert all(step.gap(worker) <= 1 for worker in step.released)


def test_the_clocks_would_differ_without_the_rebase() -> None:
    uneven = Schedule(workers=2, speeds=(1, 8), transient=0.0, iterations=20)
    before = [
        step.before for step in drive(SyncSwitch("asp@0.4,bsp", total=40), uneven) if step.decision.rebase
    ]
    assert max(before[0].values()) - min(before[0].values()) > 3


def test_the_new_rule_has_nothing_to_remember_and_the_gathered_gradients_make_a_step() -> None:
    pacer = started(SyncSwitch("hybrid_sgd(threshold=constant,first=2,wait=never)@5,asp"), 3)
    assert pacer.push(0, 1.0).release == (0,)
    assert pacer.push(1, 1.0).flushed == {0: 1.0, 1: 1.0}
    assert pacer.push(2, 2.0).release == ()
    assert pacer.push(0, 2.0).flushed == {0: 1.0, 2: 1.0}
    last = pacer.push(1, 2.0)
    assert (last.flush, last.flushed, last.rebase) == (Flush.PART, {1: 1.0}, True)
    assert set(last.release) == {0, 1, 2}


@given(schedule=schedules(churn=False), share=st.integers(1, 9))
def test_a_phase_of_single_pushes_ends_after_exactly_its_share(schedule: Schedule, share: int) -> None:
    total = schedule.workers * schedule.iterations
    protocol = SyncSwitch(f"asp@{share / 10},bsp", total=total)
    for step in drive(protocol, schedule):
        if step.decision.rebase:
            wanted = floor(total * share / 10 + 0.5)
            assert wanted <= step.clocks.total_samples <= max(wanted, schedule.workers)


def test_a_joiner_is_waited_for_and_who_dies_is_not() -> None:
    pacer = started(SyncSwitch("asp@2,bsp"), 2)
    assert pacer.push(0, 1.0).release == ()
    pacer.join(2, 1.5)
    assert pacer.push(1, 2.0).release == ()
    pacer.push(2, 3.0)
    pacer = started(SyncSwitch("asp@2,bsp"), 2)
    pacer.push(0, 1.0)
    ended = pacer.leave(1, 2.0)
    assert (ended.release, ended.rebase) == ((0,), True)


# -- one after another when lockstep ends ---------------------------------------------------------


def test_with_a_ramp_workers_begin_asp_one_after_another() -> None:
    schedule = Schedule(workers=4, transient=0.0, iterations=8)
    steps = list(drive(SyncSwitch("bsp@8,asp", asp_ramp_s=0.75), schedule))
    switch = next(i for i, step in enumerate(steps) if step.decision.rebase)
    begun: dict[int, float] = {}
    for step in steps[switch:]:
        for worker in step.released:
            begun.setdefault(worker, step.now - steps[switch].now)
    assert begun == {0: 0.0, 1: 0.75, 2: 1.5, 3: 2.25}
    assert all(step.decision.ask_again_s is None for step in steps[:switch])


@given(schedule=schedules(), ramp=st.sampled_from([0.125, 1.0, 7.0]), last=st.sampled_from(["asp", "ssp"]))
def test_with_a_ramp_and_churn_everybody_goes_on_in_the_end(
    schedule: Schedule, ramp: float, last: str
) -> None:
    """`drive` fails when all wait and no timer runs, or when somebody is released who does not wait."""
    for step in drive(SyncSwitch(f"bsp@5,asp@20,bsp@30,{last}", asp_ramp_s=ramp), schedule):
        again = step.decision.ask_again_s
        assert again is None or 0 < again <= ramp * (schedule.workers + len(schedule.joins))


def test_a_detour_and_a_phase_after_asp_have_no_ramp() -> None:
    free = drive(SyncSwitch("asp@8,ssp", asp_ramp_s=3.0), Schedule(workers=4))
    assert all(step.decision.ask_again_s is None for step in free)


def test_a_resumed_run_has_no_ramp_left_to_wait_for() -> None:
    protocol = SyncSwitch("bsp@2,asp", asp_ramp_s=50.0)
    pacer = started(protocol, 2)
    rounds(pacer, 1, {0: 1.0, 1: 1.0})
    assert protocol.ramp == {1: 51.0}
    other = SyncSwitch("bsp@2,asp", asp_ramp_s=50.0)
    restore(other, memory(protocol))
    again = Pacer(other)
    again.resume(1, 2)
    for worker in range(2):
        again.join(worker, 0.0)
    assert again.push(1, 1.0).release == (1,)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_ramp_of_no_length_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="asp_ramp_s must be >= 0"):
        SyncSwitch(asp_ramp_s=seconds)


# -- what is unknown ------------------------------------------------------------------------------


def test_as_long_as_the_work_is_unknown_a_share_does_not_end_and_a_note_says_so_once() -> None:
    steps = list(drive(SyncSwitch("bsp@0.1,asp"), Schedule(workers=3, iterations=30)))
    notes = [step.decision.note for step in steps if step.decision.note]
    assert [step.decision.rebase for step in steps if step.decision.rebase] == []
    assert len(notes) == 1
    assert "phase 1 of 2 (bsp) does not end" in notes[0]
    assert "total=SAMPLES" in notes[0]


def test_ends_in_samples_need_no_plan() -> None:
    pacer = started(SyncSwitch("bsp@6,asp"), 3)
    ends = [d.rebase for d in rounds(pacer, 4, {0: 1.0, 1: 1.0, 2: 1.0})]
    assert ends == [False, True, False, False]


def test_the_planned_work_is_what_shares_are_of_unless_total_says_otherwise() -> None:
    equal = {0: 1.0, 1: 1.0}
    planned = rounds(started(SyncSwitch("bsp@0.5,asp"), 2, planned=8), 4, equal)
    stated = rounds(started(SyncSwitch("bsp@0.5,asp", total=4), 2, planned=8), 4, equal)
    assert [d.rebase for d in planned] == [False, True, False, False]
    assert [d.rebase for d in stated] == [True, False, False, False]


@pytest.mark.parametrize(("samples", "phase"), [(0, 0), (9, 0), (10, 1), (39, 1), (40, 2)])
def test_a_resumed_run_goes_on_in_the_phase_it_was_in(samples: int, phase: int) -> None:
    protocol = SyncSwitch("bsp@10,ssp@40,asp")
    pacer = Pacer(protocol)
    pacer.resume(7, samples)
    pacer.join(0, 0.0)
    assert protocol.at == phase
    assert pacer.push(0, 1.0).version == 8


def test_a_resumed_run_goes_on_with_its_detour_and_with_what_is_left_of_the_phase() -> None:
    def fresh() -> SyncSwitch:
        return SyncSwitch("bsp@0.25,asp", total=160, online="greedy", **QUICK)

    def resumed(protocol: SyncSwitch, samples: int) -> Pacer:
        saved = memory(protocol)
        protocol = fresh()
        restore(protocol, saved)
        pacer = Pacer(protocol)
        pacer.resume(0, samples)
        for worker in range(4):
            pacer.join(worker, 0.0)
        return pacer

    protocol, equal = fresh(), dict.fromkeys(range(4), 1.0)
    pacer = started(protocol, 4)
    rounds(pacer, 1, equal | {3: 5.0})
    freely = sorted((5 + k * (5 if worker == 3 else 1), worker) for worker in range(4) for k in range(1, 25))
    for now, worker in freely[:80]:
        pacer.push(worker, now)
    assert protocol.detour
    pacer = resumed(protocol, 84)
    rounds(pacer, 1, equal)
    back = pacer.protocol
    assert isinstance(back, SyncSwitch)
    assert (back.detour, back.at, back.shift) == (False, 0, -84.0)
    ends = [decision.rebase for decision in rounds(resumed(back, 88), 12, equal)]
    assert ends.index(True) == 8


def test_the_rules_inside_are_saved_with_it() -> None:
    def fresh() -> SyncSwitch:
        return SyncSwitch("dssp(lower=0,upper=4)@0.9,asp", total=60)

    protocol, granted = fresh(), False
    for _ in drive(protocol, Schedule(workers=3, speeds=(1, 3, 5))):
        granted = granted or bool(memory(protocol)["rules"][0]["grants"])
        other = fresh()
        restore(other, memory(protocol))
        assert memory(other) == memory(protocol)
    assert granted


def test_in_lockstep_is_what_the_phase_is() -> None:
    pacer = started(SyncSwitch("bsp@2,asp"), 2)
    assert pacer.in_lockstep
    rounds(pacer, 1, {0: 1.0, 1: 1.0})
    assert not pacer.in_lockstep
    assert started(BSP(), 1).in_lockstep
    assert not started(ASP(), 1).in_lockstep
