"""What a trace adds up to."""

from __future__ import annotations

from collections import Counter
from math import inf, nan
from typing import Any

import msgspec
import pytest
from hypothesis import given

from paceline.protocols.settings import make
from paceline.trace import Result, tally
from paceline.trace.events import (
    AnyEvent,
    Decided,
    Evaluated,
    Exchanged,
    ModelReady,
    Progress,
    Reported,
    RunEnded,
    Totals,
    WorkerJoined,
    WorkerLeft,
)
from paceline.trace.landscape import LandscapeSummary
from paceline.trace.lasting import Books
from support.drive import Schedule
from support.schedules import schedules
from support.traces import run_of, started
from support.variants import label, variants


def result(*events: AnyEvent, **start: Any) -> Result:
    return tally([started(**start), *events]).result()


def push(t: float, worker: int, release: tuple[int, ...] = (), **more: Any) -> Decided:
    return Decided(t, 0, worker, **{"version": 0, "fate": "apply", "release": release, **more})


def joined(workers: int = 2, t: float = 0.0) -> list[WorkerJoined]:
    return [WorkerJoined(t, worker) for worker in range(workers)]


# Waiting


def test_waiting_share_is_time_between_push_and_release_of_the_time_taken_part() -> None:
    told = result(*joined(), push(2.0, 0), push(5.0, 1, (1, 0)), RunEnded(10.0, "finished"))
    assert told.waiting_share == [0.3, 0.0]


def test_a_wait_that_has_not_ended_counts_so_far() -> None:
    assert result(*joined(), push(2.0, 0), push(4.0, 1, (1,))).waiting_share == [0.5, 0.0]


def test_time_before_joining_and_after_leaving_is_no_time_taken_part() -> None:
    told = result(
        *joined(),
        WorkerLeft(2.0, 1, "finished"),
        push(3.0, 0),
        Decided(4.0, 0, None, 0, release=(0,)),
        WorkerLeft(4.0, 0, "finished"),
        RunEnded(8.0, "finished"),
    )
    assert told.waiting_share == [0.25, 0.0]


def test_a_worker_that_comes_back_adds_both_times() -> None:
    told = result(
        *joined(1),
        push(1.0, 0),
        WorkerLeft(2.0, 0, "died"),
        WorkerJoined(6.0, 0),
        RunEnded(8.0, "finished"),
        workers=1,
    )
    assert told.waiting_share == [0.25]


def test_a_worker_that_leaves_while_it_waits_has_waited_until_then() -> None:
    told = result(*joined(), push(1.0, 0), WorkerLeft(3.0, 0, "died"), push(9.0, 1, (1,)))
    assert told.waiting_share[0] == pytest.approx(2 / 3)


def test_nobody_knows_the_share_of_a_worker_that_never_joined() -> None:
    assert result(WorkerJoined(0.0, 1), RunEnded(1.0, "finished")).waiting_share == [None, 0.0]


# Gap and staleness


def test_max_clock_gap_is_the_largest_lead_at_a_release() -> None:
    told = result(push(1.0, 0, (0,), gap=2), push(2.0, 0, gap=9), push(3.0, 1, (1,), gap=1))
    assert told.max_clock_gap == 2


def test_staleness_has_mean_95th_percentile_and_maximum() -> None:
    ages = [0] * 18 + [4, 9]  # 20 gradients: the 19th smallest is the 95th percentile
    told = result(*(push(float(t), 0, (0,), staleness=age) for t, age in enumerate(ages))).staleness
    assert told is not None
    assert (told.mean, told.p95, told.max) == (13 / 20, 4, 9)


def test_the_95th_percentile_moves_with_one_more_old_gradient() -> None:
    ages = [0] * 18 + [9, 9, 9]
    told = result(*(push(float(t), 0, (0,), staleness=age) for t, age in enumerate(ages))).staleness
    assert told is not None
    assert told.p95 == 9


@pytest.mark.parametrize("fate", ["drop", "skip"])
def test_a_gradient_that_was_never_applied_has_no_staleness(fate: str) -> None:
    told = result(push(1.0, 0, (0,), staleness=50, fate=fate), push(2.0, 1, (1,), staleness=1, fate="hold"))
    assert told.staleness is not None
    assert (told.staleness.mean, told.staleness.max) == (1.0, 1)


# Work, loss, accuracy, target


def test_samples_updates_and_bytes_are_counted() -> None:
    told = result(
        ModelReady(0.0, 10, 40, 20),
        push(1.0, 0, (0,), samples=32, version=1),
        push(2.0, 1, (1,), samples=16, version=2),
        RunEnded(4.0, "finished"),
    )
    assert (told.samples, told.samples_per_s, told.updates, told.seconds) == (48, 12.0, 2, 4.0)
    assert (told.bytes_sent, told.bytes_received) == (40, 80)


def test_time_to_target_is_the_first_evaluation_that_reaches_it() -> None:
    reached = [
        Evaluated(float(t), 0, t, t, {"accuracy": a}) for t, a in enumerate([0.1, 0.8, 0.9, 0.7, 0.95])
    ]
    told = result(*reached, target=0.9)
    assert (told.time_to_target_s, told.accuracy, told.target) == (2.0, 0.95, 0.9)
    assert result(*reached, target=0.96).time_to_target_s is None
    assert result(*reached).time_to_target_s is None


def test_an_evaluation_without_accuracy_reaches_no_target() -> None:
    evaluated = Evaluated(1.0, 0, 1, 1, {"loss": 0.1})
    assert result(evaluated, target=0.0).time_to_target_s is None


def test_loss_is_the_last_evaluated_one_or_else_the_mean_of_the_last_reported() -> None:
    reported = [Reported(float(t), 0, t, {"loss": float(t)}) for t in range(100)]
    assert result(*reported).loss == 74.5  # of the last fifty
    assert result(*reported, Evaluated(3.0, 0, 1, 1, {"loss": 0.25})).loss == 0.25
    assert result(*reported, Evaluated(3.0, 0, 1, 1, {"accuracy": 0.5})).loss == 74.5


@pytest.mark.parametrize("value", [nan, inf])
def test_a_loss_that_diverged_is_null(value: float) -> None:
    fine = Reported(1.0, 0, 1, {"loss": 1.0})
    for last in (Reported(2.0, 0, 2, {"loss": value}), Evaluated(3.0, 0, 1, 1, {"loss": value})):
        diverged = result(fine, last)
        assert (diverged.loss, diverged.loss_missing) == (None, "not finite")


def test_a_loss_that_nobody_reported_is_null_and_said_to_be() -> None:
    nothing = result(script="script.py")
    assert (nothing.loss, nothing.loss_missing) == (None, "unreported")
    assert result().loss_missing is None, "times alone were simulated"
    assert result(Reported(1.0, 0, 1, {"loss": 1.0})).loss_missing is None


def test_what_is_not_known_is_null() -> None:
    told = msgspec.to_builtins(result())
    nulls = {name for name, value in told.items() if value is None}
    assert nulls == {
        *("samples_per_s", "loss", "accuracy", "target", "time_to_target_s", "max_clock_gap"),
        *("staleness", "bytes_sent", "bytes_received", "bytes_sent_each", "emulated", "fabric"),
        *("barrier_looks", "barrier_questions", "mesh", "bytes_by_axis", "lookups", "lssr", "trigger"),
        *("sent_ahead", "consensus_distance", "landscape"),
        *("loss_at", "accuracy_at"),
        *("samples_due", "loss_missing"),
    }
    assert told["waiting_share"] == [None, None]
    assert (told["status"], told["failures"]) == ("running", [])


def test_the_dead_and_the_failed_are_failures_and_nobody_else_is() -> None:
    reasons = ["finished", "away", "died", "failed", "stopped"]
    told = result(*(WorkerLeft(float(n), n, why, f"was {why}") for n, why in enumerate(reasons)))  # type: ignore[arg-type]
    assert [(f.worker, f.t, f.reason, f.detail) for f in told.failures] == [
        (2, 2.0, "died", "was died"),
        (3, 3.0, "failed", "was failed"),
    ]


# Summed up instead of one by one


@pytest.mark.parametrize("variant", variants(), ids=label)
@given(schedule=schedules())
def test_totals_give_the_same_result_as_the_same_decisions_one_by_one(
    variant: tuple[str, dict[str, Any]], schedule: Schedule
) -> None:
    one_by_one = list(run_of(make(*variant), schedule))
    full, short = tally(one_by_one).result(), tally(summed_up(one_by_one)).result()
    assert msgspec.structs.replace(short, waiting_share=[]) == msgspec.structs.replace(full, waiting_share=[])
    assert short.waiting_share == pytest.approx(full.waiting_share)


def summed_up(events: list[AnyEvent]) -> list[AnyEvent]:
    """Progress and Totals instead of decisions, counted here without a tally."""
    decided = [event for event in events if isinstance(event, Decided)]
    pushes = [event for event in decided if event.pushed is not None]
    samples, end = sum(event.samples for event in pushes), events[-1]
    progress = Progress(end.t, len(pushes), samples, decided[-1].version, 0, 0, 0)
    gap = max((event.gap for event in decided if event.release), default=None)
    ages = dict(Counter(event.staleness for event in pushes if event.fate != "drop"))
    waits = tuple(waits_of(events, rank) for rank in range(events[0].workers))  # type: ignore[union-attr]
    totals = Totals(end.t, len(pushes), samples, gap, ages, (0.0,) * len(waits), waits)
    return [*(event for event in events[:-1] if not isinstance(event, Decided)), progress, totals, end]


def waits_of(events: list[AnyEvent], rank: int) -> float:
    waited, since = 0.0, None
    for event in events:
        if isinstance(event, Decided) and event.pushed == rank:
            since = event.t
        ended = isinstance(event, Decided) and rank in event.release
        left = isinstance(event, WorkerLeft) and event.worker == rank
        if since is not None and (ended or left):
            waited, since = waited + event.t - since, None
    return waited


def test_peers_move_what_they_exchange_and_not_what_they_compute() -> None:
    events = [
        started(3, family="peer"),
        ModelReady(0.0, 10, 40, 40),
        *(WorkerJoined(0.0, rank) for rank in range(3)),
        Decided(1.0, 1, 0, 0, fate="hold", release=(0,), samples=4),
        Exchanged(2.0, "average", (0, 1, 2), 40),
        Exchanged(3.0, "agree", (1, 2), 1),
        Exchanged(3.5, "average", (0, 1), 10, answer_bytes=25),
        RunEnded(4.0, "finished"),
    ]
    total = tally(events)
    assert dict(total.exchanged_bytes) == {0: 50, 1: 51, 2: 41}
    assert (total.result().bytes_sent, total.result().bytes_received) == (142, 172)
    assert total.result().bytes_sent_each == [50, 51, 41]


def test_in_a_paced_run_every_worker_has_sent_its_pushes() -> None:
    told = result(
        ModelReady(0.0, 10, 40, 44), *joined(), push(1.0, 0, (0,)), push(2.0, 0, (0,)), push(3.0, 1)
    )
    assert told.bytes_sent_each == [88, 44]
    assert told.bytes_sent == 132
    summed = result(
        ModelReady(0.0, 10, 40, 44), Totals(1.0, 3, 12, 0, {0: 3}, (1.0,), (0.0,)), summarised=True
    )
    assert (summed.bytes_sent, summed.bytes_sent_each) == (132, None)
    each = Totals(1.0, 3, 12, 0, {0: 3}, (1.0,), (0.0,), (2, 1))
    assert result(ModelReady(0.0, 10, 40, 44), each, summarised=True).bytes_sent_each == [88, 44]


def test_the_last_lssr_that_was_told_is_the_results_and_without_any_it_is_unknown() -> None:
    told = result(Reported(1.0, 0, 1, {"lssr": 0.0}), Reported(2.0, 1, 2, {"lssr": 0.5, "loss": 1.0}))
    assert told.lssr == 0.5
    assert result(Reported(1.0, 0, 1, {"loss": 1.0})).lssr is None


def test_the_lssr_of_lines_that_were_left_out_is_in_the_totals() -> None:
    books, told = Books(), [started(), Reported(1.0, 0, 1, {"lssr": 0.1}), Reported(2.0, 0, 2, {"lssr": 0.6})]
    for event in told:
        books.add(event)
    assert result(told[1], books.totals(3.0)).lssr == 0.6


MEASURED = [
    Reported(1.0, 0, 1, {"effective_lr": 1.0, "weight_variance": 0.0, "noise_strength": 0.25}),
    Exchanged(1.0, "average", (0, 1), 300, ahead=False),
    Evaluated(1.5, 0, 1, 4, {"loss": 2.0, "consensus_distance": 0.5}),
    Exchanged(2.0, "average", (0, 1), 100, ahead=True),
    Reported(2.0, 0, 2, {"effective_lr": 0.25, "weight_variance": 4.0, "noise_strength": 0.0}),
    Reported(3.0, 1, 3, {"consensus_distance": 0.125}),
    Reported(3.5, 1, 3, {"effective_lr": inf, "weight_variance": nan, "noise_strength": 0.0}),
    Reported(4.0, 0, 4, {"effective_lr": 0.5, "weight_variance": 1.0, "noise_strength": 0.0}),
]


def test_what_travelled_ahead_and_what_was_measured_are_in_the_result() -> None:
    told = result(*MEASURED, family="peer")
    assert told.sent_ahead == 0.25
    assert told.consensus_distance == 0.125
    assert told.landscape == LandscapeSummary(
        reports=3, effective_lr=1.75 / 3, lowest=0.25, last=0.5, weight_variance=4.0, noise_strength=0.25
    )
    plain = result(Exchanged(1.0, "average", (0, 1), 300), Reported(1.0, 0, 1, {"loss": 1.0}), family="peer")
    assert (plain.sent_ahead, plain.consensus_distance, plain.landscape) == (None, None, None)
    nothing = result(Exchanged(1.0, "average", (0, 1), 300, ahead=False), family="peer")
    assert nothing.sent_ahead == 0.0


def test_the_same_of_lines_that_were_left_out_is_in_the_totals() -> None:
    books, whole = Books(), result(*MEASURED, family="peer")
    for event in [started(family="peer"), *MEASURED]:
        books.add(event)
    short = result(*MEASURED[:3], books.totals(4.0), family="peer")
    for name in ("sent_ahead", "consensus_distance", "landscape"):
        assert getattr(short, name) == getattr(whole, name)
