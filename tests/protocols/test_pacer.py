"""The pacer books what a protocol says, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import pytest

from paceline.protocols import Clocks, Fate, Flush, Pacer, Verdict
from paceline.protocols.core.base import memory
from paceline.protocols.settings import make
from support.drive import Schedule, drive


@dataclass
class Says:
    """A protocol that gives the verdicts it was told to give, then applies and releases."""

    lockstep: ClassVar[bool] = False
    verdicts: list[Verdict]

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        if pushed is None:
            return Verdict()
        return self.verdicts.pop(0) if self.verdicts else Verdict(release=(pushed,))


def started(*verdicts: Verdict, workers: int = 2) -> Pacer:
    pacer = Pacer(Says(list(verdicts)))
    for worker in range(workers):
        pacer.join(worker, 0.0)
    return pacer


def test_decisions_are_numbered_from_one_without_a_gap() -> None:
    pacer = Pacer(Says([]))
    numbers = [
        pacer.join(0, 0.0).number,
        pacer.push(0, 1.0).number,
        pacer.timer(2.0).number,
        pacer.leave(0, 3.0).number,
    ]
    assert numbers == [1, 2, 3, 4]


def test_the_step_is_made_before_the_release_so_the_released_reads_it() -> None:
    pacer = started(Verdict(release=(0,)))
    decision = pacer.push(0, 1.0)
    assert decision.version == 1
    assert pacer.clocks.staleness(0) == 0
    assert pacer.clocks.staleness(1) == 1


def test_a_flush_is_made_before_the_release_so_the_released_reads_it() -> None:
    pacer = started(Verdict(fate=Fate.HOLD, flush=Flush.SUM, weight=0.5, release=(0,)))
    decision = pacer.push(0, 1.0)
    assert (decision.flush, decision.flushed, decision.version) == (Flush.SUM, {0: 0.5}, 1)
    assert pacer.clocks.staleness(0) == 0


def test_a_flush_takes_the_gradient_held_by_the_same_verdict_and_all_earlier_ones() -> None:
    pacer = started(Verdict(fate=Fate.HOLD, weight=2.0), Verdict(fate=Fate.HOLD, flush=Flush.MEAN))
    assert pacer.push(1, 1.0).flushed == {}
    assert pacer.clocks.held == 1
    assert list(pacer.push(0, 2.0).flushed.items()) == [(0, 1.0), (1, 2.0)]
    assert pacer.clocks.held == 0


def test_a_flush_of_nothing_is_no_step() -> None:
    pacer = started(Verdict(fate=Fate.DROP, flush=Flush.MEAN))
    decision = pacer.push(0, 1.0)
    assert (decision.flush, decision.flushed, decision.version) == (None, {}, 0)


def test_a_dropped_gradient_is_no_step_and_its_work_counts() -> None:
    pacer = started(Verdict(fate=Fate.DROP, release=(0,)))
    assert pacer.push(0, 1.0, samples=8).version == 0
    assert (pacer.clocks.clock(0), pacer.clocks.total_samples, pacer.clocks.pushes) == (1, 8, 1)


def test_a_gradient_that_is_not_usable_is_dropped_and_the_verdict_stands_otherwise() -> None:
    pacer = started(Verdict(fate=Fate.HOLD, flush=Flush.MEAN, release=(0,)), Verdict(release=(1,)))
    held, applied = pacer.push(0, 1.0, usable=False), pacer.push(1, 2.0, usable=False)
    assert (held.fate, held.flush, held.release) == (Fate.DROP, None, (0,))
    assert (applied.fate, applied.release, applied.version) == (Fate.DROP, (1,), 0)


def test_read_and_staleness_tell_on_which_weights_a_gradient_was_computed() -> None:
    pacer = started()
    pacer.push(0, 1.0)
    pacer.push(0, 2.0)
    late = pacer.push(1, 3.0)
    assert (late.read, late.staleness, late.version) == (0, 2, 3)


def test_a_resumed_run_goes_on_counting_from_the_checkpoints_version() -> None:
    pacer = Pacer(Says([]))
    pacer.resume(40)
    pacer.join(0, 0.0)
    decision = pacer.push(0, 1.0)
    assert (decision.read, decision.staleness, decision.version) == (40, 0, 41)


def test_without_a_push_there_is_no_fate_and_no_step() -> None:
    pacer = started()
    decision = pacer.timer(1.0)
    assert (decision.pushed, decision.fate, decision.version, decision.staleness) == (None, None, 0, 0)
    assert pacer.clocks.now == 1.0


def test_scale_and_timer_are_passed_on() -> None:
    decision = started(Verdict(lr_scale=0.25, ask_again_s=3.0)).push(0, 1.0)
    assert (decision.lr_scale, decision.ask_again_s) == (0.25, 3.0)


@pytest.mark.parametrize("release", [(1,), (0, 0), (7,)], ids=["computing", "twice", "absent"])
def test_a_verdict_that_releases_who_does_not_wait_is_refused(release: tuple[int, ...]) -> None:
    with pytest.raises(KeyError):
        started(Verdict(release=release)).push(0, 1.0)


def test_gap_is_the_largest_lead_among_the_released() -> None:
    pacer = started(Verdict(), Verdict(release=(0,)), Verdict(), workers=3)
    pacer.push(1, 1.0)
    assert pacer.push(0, 2.0).gap == 1
    pacer.push(0, 3.0)
    assert pacer.push(2, 4.0).gap == 0


def test_a_rule_at_rest_remembers_nobody_who_was_under_way() -> None:
    """Where they were to stop was told by clocks that workers who begin anew do not have."""
    pacers: list[Pacer] = []
    schedule = Schedule(workers=4, speeds=(1, 2, 5), iterations=30)
    for _ in islice(drive(make("elastic_bsp"), schedule, between=pacers.append), 57):
        pass
    assert memory(pacers[-1].protocol)["stops"]
    assert not memory(pacers[-1].at_rest())["stops"]
    assert memory(pacers[-1].protocol)["stops"], "the rule itself goes on"


def test_without_a_flush_no_gradient_is_taken() -> None:
    pacer = started(Verdict(fate=Fate.HOLD))
    assert pacer.push(0, 1.0).gradients == 0


def test_who_passes_a_barrier_of_its_own_has_no_stale_gradient() -> None:
    pacer = started(Verdict())
    pacer.push(0, 1.0)
    passed = pacer.passed(0, 2.0)
    assert (passed.release, passed.pushed, passed.fate) == ((0,), None, None)
    assert (passed.read, passed.staleness, passed.version) == (1, 0, 1)


def test_a_gradient_is_dropped_exactly_when_it_missed_more_updates_than_allowed() -> None:
    pacer = Pacer(Says([]), drop_staler=1)
    for worker in (0, 1, 2):
        pacer.join(worker, 0.0)
    fates = [pacer.push(worker, 1.0).fate for worker in (0, 1, 2, 2, 0)]
    assert fates == [Fate.APPLY, Fate.APPLY, Fate.DROP, Fate.APPLY, Fate.DROP]
