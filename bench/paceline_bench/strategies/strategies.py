"""`paceline bench strategies`: an evaluation of DDP, FSDP and parameter servers, done again here."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec

from paceline_bench.cluster import cifar
from paceline_bench.experiment import carried_out
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.strategies.cells import QUICK, Setup, chosen_cells, left_out
from paceline_bench.strategies.data import ImageData, digits, images
from paceline_bench.strategies.outcome import StrategyResults
from paceline_bench.strategies.roster import chosen_strategies
from paceline_bench.strategies.runs.body import shape_of
from paceline_bench.strategies.series import Runner, StrategySeries
from paceline_bench.strategies.told.best import best_rows
from paceline_bench.strategies.told.findings import findings
from paceline_bench.strategies.told.formulas import Loads
from paceline_bench.strategies.told.scoring import advice_rows
from paceline_bench.strategies.told.tables import ResultGrid, tables


def check(plan: BenchPlan) -> None:
    """Whether there is all that it takes, before anything is measured."""
    chosen_cells(plan.cells, plan.quick)
    chosen_strategies(plan.protocols, plan.quick)
    StrategyResults(_file(plan))
    if plan.data is not None:
        cifar.find(Path(plan.data))


def strategies(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """All runs, one after the other, then the tables."""
    check(plan)
    data, results = _data(plan), StrategyResults(_file(plan))
    series = _series(plan, data)
    say(f"strategies: {len(series.cells)} cells; {left_out(series.cells)} more of the grid with --cells '*'")
    loads = Loads(series.setup, shape_of(data.test_x))
    experiment = Runner(series, data, results, say).experiment(lambda: _rows(series, results, loads))
    return carried_out(experiment, plan, say)


def _rows(series: StrategySeries, results: StrategyResults, loads: Loads) -> list[BenchRow]:
    seen = [
        series.measured(cell, strategy, results)
        for cell in series.cells
        for strategy in series.strategies
        if strategy.takes(cell)
    ]
    grid = ResultGrid(seen, series.setup, loads)
    return [*findings(grid), *tables(grid), *best_rows(grid), *advice_rows(grid)]


def _series(plan: BenchPlan, data: ImageData) -> StrategySeries:
    setup = QUICK if plan.quick else Setup()
    if plan.rates:
        setup = msgspec.structs.replace(setup, rates=plan.rates)
    return StrategySeries(
        cells=chosen_cells(plan.cells, plan.quick),
        strategies=chosen_strategies(plan.protocols, plan.quick),
        seeds=tuple(range(plan.seed, plan.seed + plan.seeds)),
        setup=setup,
        data=data.name,
        version=version("paceline"),
    )


def _data(plan: BenchPlan) -> ImageData:
    return digits() if plan.data is None else images(Path(plan.data))


def _file(plan: BenchPlan) -> Path | None:
    return None if plan.results is None else Path(plan.results)
