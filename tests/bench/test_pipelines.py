"""What the benchmarks of pipelines and of split layers hold their measurements against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import RunError
from paceline.parallel.layers.costs import LayerFigures
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.layers.layers import FULL, check
from paceline_bench.layers.script import WorkerFigures
from paceline_bench.pipelines import accuracy
from paceline_bench.pipelines.accuracy import (
    EXACT,
    PipelineData,
    PipelineEntry,
    Speeds,
    _batches,
    _best_rate,
    _made_up,
    to_accuracy,
)
from paceline_bench.pipelines.pipelines import CASES, allowed_speedup


def test_theory_gives_torchs_schedules_their_bubbles() -> None:
    """5.25, 4.125 and 3.5625 units against 3 with stored graphs, 4 where batches are computed once more."""
    turns, stored, _, again = CASES[:4]
    assert [allowed_speedup(stored, micro) for micro in (4, 8, 16)] == [1.75, 1.375, 1.1875]
    assert allowed_speedup(again, 4) == 5.25 / 4
    assert allowed_speedup(turns, 4) == 5.25 / 12


def test_time_to_accuracy_is_batches_times_seconds_per_batch() -> None:
    rows = to_accuracy(Speeds({"adl": 0.5}, 2.0), BenchPlan(quick=True), lambda text: None)
    exact = _batches(EXACT, _made_up(), 0, 0.05)
    ours = _batches(PipelineEntry("adl"), _made_up(), 0, 0.05)
    assert exact
    assert ours
    assert rows[0].measured["gpipe or 1f1b"].median == exact * 2.0
    assert rows[0].value == pytest.approx(exact * 2.0 / (ours * 0.5))


def test_one_stage_after_another_needs_the_exact_batches() -> None:
    rows = to_accuracy(Speeds({"adl": 0.5, "bp": 4.0}, 2.0), BenchPlan(quick=True), lambda text: None)
    assert [row.case["protocol"] for row in rows] == ["adl", "adl predict=True", "bp"]
    assert rows[-1].value == 0.5


@pytest.mark.parametrize(
    ("taken", "best", "tried"),
    [
        ({0.1: 40, 0.2: 24, 0.3: 32}, 0.2, [100, 39, 23]),
        ({0.1: 0, 0.2: 0, 0.3: 56}, 0.3, [100, 100, 100]),
        ({0.1: 24, 0.2: 24, 0.3: 0}, 0.1, [100, 23, 23]),
        ({0.1: 0, 0.2: 100, 0.3: 100}, 0.2, [100, 100, 99]),
        ({0.1: 0, 0.2: 0, 0.3: 0}, 0.1, [100, 100, 100]),
    ],
)
def test_the_best_rate_is_the_soonest_there_and_others_are_given_up(
    monkeypatch: pytest.MonkeyPatch, taken: dict[float, int], best: float, tried: list[int]
) -> None:
    given = []

    def batches(entry: PipelineEntry, data: PipelineData, seed: int, rate: float) -> int:
        given.append(data.most)
        return taken[rate] if taken[rate] <= data.most else 0

    monkeypatch.setattr(accuracy, "_batches", batches)
    assert _best_rate(EXACT, _made_up()._replace(rates=(0.1, 0.2, 0.3)), 0) == best
    assert given == tried


def test_figures_that_are_not_the_cost_models_end_the_benchmark() -> None:
    right = LayerFigures(100.0, 1000.0, 64.0, 5)
    check(0, WorkerFigures(right, LayerFigures(100.0, 950.0, 64.0, 5)))
    for field, off in (("weight_bytes", 101.0), ("sent_bytes", 65.0), ("synchronisations", 4)):
        wrong = replace(right, multiply_adds=950.0, **{field: off})
        with pytest.raises(RunError, match="by the cost model"):
            check(0, WorkerFigures(right, wrong))
    with pytest.raises(RunError, match="multiply-adds"):
        check(0, WorkerFigures(right, LayerFigures(100.0, 1001.0, 64.0, 5)))


def test_the_model_of_the_benchmark_is_larger_than_the_budget_of_one_worker_and_a_quarter_is_not() -> None:
    assert FULL.weight_bytes > FULL.budget_mb << 20
    assert 2 * FULL.weight_bytes / 4 < FULL.budget_mb << 20, "weights and gradients"
