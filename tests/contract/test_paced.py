"""What every paced protocol promises whatever its paper: over random schedules with deaths and joins."""

from __future__ import annotations

from collections import Counter
from itertools import islice, zip_longest
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from paceline.protocols import Clocks, Decision, Fate, Pacer, Pacing, Verdict
from paceline.protocols.core.base import memory, restore
from paceline.protocols.paced.psp_distributed import PeerBarrier, own_barrier
from paceline.protocols.settings import make, resolved
from support.drive import Schedule, Step, drive
from support.schedules import schedules
from support.variants import label, variants

Variant = tuple[str, dict[str, Any]]
every_protocol = pytest.mark.parametrize("variant", variants(), ids=label)


class Observed:
    """A protocol with somebody looking over its shoulder."""

    def __init__(self, protocol: Pacing) -> None:
        self.protocol = protocol
        self.lockstep = protocol.lockstep
        self.verdicts: list[Verdict] = []
        self.tables: list[tuple[Any, Any]] = []

    def own_barrier(self, rank: int) -> PeerBarrier | None:
        return own_barrier(self.protocol, rank)

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        before = everything(clocks)
        self.verdicts.append(self.protocol.decide(clocks, pushed))
        self.tables.append((before, everything(clocks)))
        return self.verdicts[-1]


def everything(clocks: Clocks) -> Any:
    """All that a clock table tells."""
    workers = list(clocks.active)
    return (
        (clocks.now, clocks.version, clocks.pushes, clocks.held, clocks.slowest, clocks.fastest),
        (dict(clocks.completed), clocks.waiting(), clocks.waiting_count),
        [(w, clocks.staleness(w), clocks.last_push_s(w), clocks.interval_s(w)) for w in workers],
        clocks.laggard() if workers else None,
    )


def decisions(protocol: Pacing, schedule: Schedule) -> list[Decision]:
    return [step.decision for step in drive(protocol, schedule)]


@every_protocol
@given(schedule=schedules())
def test_some_worker_can_always_run(variant: Variant, schedule: Schedule) -> None:
    for _ in drive(make(*variant), schedule):  # fails when every worker waits
        pass


@every_protocol
@given(schedule=schedules())
def test_whoever_is_not_killed_finishes_so_the_finished_and_the_dead_never_block(
    variant: Variant, schedule: Schedule
) -> None:
    ended: Counter[str] = Counter(step.event for step in drive(make(*variant), schedule))
    assert ended["finished"] == ended["join"] - ended["died"]


@every_protocol
@given(schedule=schedules())
def test_every_push_has_exactly_one_release_unless_its_worker_left(
    variant: Variant, schedule: Schedule
) -> None:
    unanswered: dict[int, int] = {}
    for step in drive(make(*variant), schedule):
        if step.event == "push":
            unanswered[step.worker] = unanswered.get(step.worker, 0) + 1
        elif step.event in ("died", "finished"):
            unanswered.pop(step.worker, None)
        for worker in step.released:
            unanswered[worker] -= 1
        assert set(unanswered.values()) <= {0, 1}
        assert {w for w, count in unanswered.items() if count} == step.waiting | step.benched
    assert not unanswered


@every_protocol
@given(schedule=schedules())
def test_only_those_who_wait_are_released_and_each_once(variant: Variant, schedule: Schedule) -> None:
    for step in drive(make(*variant), schedule):
        assert set(step.released) <= step.waited
        assert len(set(step.released)) == len(step.released)


@every_protocol
@given(schedule=schedules())
def test_who_left_is_no_longer_in_the_table(variant: Variant, schedule: Schedule) -> None:
    for step in drive(make(*variant), schedule):
        assert dict(step.clocks.completed) == step.after
        assert set(step.clocks.waiting()) == step.waiting


@every_protocol
@given(schedule=schedules())
def test_same_schedule_same_decisions(variant: Variant, schedule: Schedule) -> None:
    assert decisions(make(*variant), schedule) == decisions(make(*variant), schedule)


@every_protocol
@settings(max_examples=settings.default.max_examples // 2)  # swaps the protocol at every event
@given(schedule=schedules())
def test_memory_survives_save_and_load_between_any_two_events(variant: Variant, schedule: Schedule) -> None:
    def swap(pacer: Pacer) -> None:
        saved = msgspec.json.decode(msgspec.json.encode(memory(pacer.protocol)))
        pacer.protocol = make(variant[0], resolved(pacer.protocol))
        restore(pacer.protocol, saved)

    swapped = [step.decision for step in drive(make(*variant), schedule, between=swap)]
    assert swapped == decisions(make(*variant), schedule)


@every_protocol
@settings(max_examples=10)
@given(schedule=schedules())
def test_a_look_at_how_it_would_be_at_rest_changes_nothing(variant: Variant, schedule: Schedule) -> None:
    def look(pacer: Pacer) -> None:
        if pacer.clocks.pushes % 7 == 3:
            pacer.at_rest()

    looked = [step.decision for step in drive(make(*variant), schedule, between=look)]
    assert looked == decisions(make(*variant), schedule)


@every_protocol
@settings(max_examples=10)
@given(schedule=schedules(), moment=integers(0, 60))
def test_workers_that_begin_anew_can_go_on_from_any_moment(
    variant: Variant, schedule: Schedule, moment: int
) -> None:
    """As after a checkpoint that was taken while others were under way, with clocks of their own."""
    pacers: list[Pacer] = []
    for step in islice(drive(make(*variant), schedule, between=pacers.append), moment, None):
        if step.clocks.held == 0:
            break
    rest, clocks = pacers[-1].at_rest(), pacers[-1].clocks
    again = make(variant[0], resolved(rest))
    restore(again, msgspec.json.decode(msgspec.json.encode(memory(rest))))

    def resume(pacer: Pacer) -> None:
        if not pacer.clocks.active and not pacer.clocks.benched:
            pacer.resume(clocks.version, clocks.total_samples, clocks.pushes)

    for _ in drive(again, schedule, between=resume):  # fails when every worker waits
        pass


@every_protocol
@given(one=schedules(), other=schedules())
def test_two_runs_at_the_same_time_do_not_see_each_other(
    variant: Variant, one: Schedule, other: Schedule
) -> None:
    both = zip_longest(drive(make(*variant), one), drive(make(*variant), other))
    together = [step and step.decision for pair in both for step in pair]
    alone = [decisions(make(*variant), schedule) for schedule in (one, other)]
    assert [d for d in together[::2] if d] == alone[0]
    assert [d for d in together[1::2] if d] == alone[1]


@every_protocol
@pytest.mark.parametrize("churn", [(), tuple((50 * n, n % 6) for n in range(20))], ids=["steady", "churn"])
def test_memory_does_not_grow_with_the_length_of_the_run(variant: Variant, churn: Any) -> None:
    late = tuple((tick + 20, worker) for tick, worker in churn)
    schedule = Schedule(workers=6, speeds=(1, 2, 7), iterations=60, deaths=churn, joins=late)
    protocol = make(*variant)
    for step in drive(protocol, schedule):
        if step.decision.number % 50 == 0:
            assert leaves(memory(protocol)) <= 6 * 6


def leaves(saved: Any) -> int:
    """How many plain values a memory holds."""
    inside = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list) else None
    return 1 if inside is None else sum(map(leaves, inside))


@every_protocol
@given(schedule=schedules())
def test_every_held_gradient_goes_into_exactly_one_flush_or_is_still_held(
    variant: Variant, schedule: Schedule
) -> None:
    observed = Observed(make(*variant))
    held: dict[int, list[float]] = {}
    for step in drive(observed, schedule):
        if step.decision.fate is Fate.HOLD:
            held.setdefault(step.worker, []).append(observed.verdicts[-1].weight)
        if observed.verdicts[-1].flush is not None:
            assert list(step.decision.flushed.items()) == [(w, sum(held[w])) for w in sorted(held)]
            held.clear()
        else:
            assert not step.decision.flushed
        assert step.clocks.held == sum(map(len, held.values()))


@every_protocol
@given(schedule=schedules())
def test_version_counts_optimizer_steps(variant: Variant, schedule: Schedule) -> None:
    version = 0
    for step in drive(make(*variant), schedule):
        version += step.decision.fate is Fate.APPLY
        version += bool(step.decision.flushed)
        assert step.decision.version == step.clocks.version == version


@every_protocol
@given(schedule=schedules())
def test_decide_only_reads_the_table(variant: Variant, schedule: Schedule) -> None:
    observed = Observed(make(*variant))
    for _ in drive(observed, schedule):
        before, after = observed.tables[-1]
        assert before == after


@every_protocol
@given(schedule=schedules())
def test_lockstep_means_weights_never_change_while_an_active_worker_computes(
    variant: Variant, schedule: Schedule
) -> None:
    protocol = make(*variant)
    version = 0
    for step in drive(protocol, schedule):
        changed, version = step.decision.version != version, step.decision.version
        if protocol.lockstep and changed:
            assert step.computing <= set(step.released)


@every_protocol
@given(schedule=schedules())
def test_a_released_worker_reads_the_weights_its_release_names(variant: Variant, schedule: Schedule) -> None:
    reads: dict[int, int] = {}
    for step in drive(make(*variant), schedule):
        if step.event == "join":
            reads[step.worker] = version_before(step)
        if step.event == "push":
            assert step.decision.staleness == version_before(step) - reads[step.worker]
        reads.update(dict.fromkeys(step.released, step.decision.version))
        assert all(step.clocks.staleness(w) == step.decision.version - reads[w] for w in step.after)


def version_before(step: Step) -> int:
    return step.decision.version - (step.decision.fate is Fate.APPLY) - bool(step.decision.flushed)
