"""The benchmark of strategies: what is compared is the same, and figures follow from what workers tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, RunError
from paceline.protocols.paced.bounded_ps import BoundedPS
from paceline.protocols.settings import make_any
from paceline.trace.events import AnyEvent, Decided, WorkerJoined, WorkerLeft
from paceline_bench.experiment import run_all
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.run import run
from paceline_bench.harness.stats import spread
from paceline_bench.kept import read_kept
from paceline_bench.strategies import outcome
from paceline_bench.strategies import series as series_module
from paceline_bench.strategies.cells import QUICK, Cell, Setup, chosen_cells, every_cell, left_out
from paceline_bench.strategies.data import digits
from paceline_bench.strategies.outcome import StrategyFigures, StrategyOutcome, gaps, rate
from paceline_bench.strategies.roster import STRATEGIES, Strategy, chosen_strategies
from paceline_bench.strategies.runs.models import MODELS, activation_bytes, make, parameter_bytes
from paceline_bench.strategies.runs.places import Ran, check_world
from paceline_bench.strategies.runs.request import Answer, StrategyRequest
from paceline_bench.strategies.series import Runner, StrategySeries
from paceline_bench.strategies.strategies import check
from paceline_bench.strategies.told.formulas import Loads, state_bytes
from paceline_bench.strategies.told.tables import ResultGrid, tables
from paceline_bench.strategies.waits import waits_of
from support.drive import Schedule, drive
from support.schedules import schedules

SHAPE = (1, 8, 8)


def answer(rank: int, ends: list[float], samples: int = 8, world: int = 2) -> Answer:
    return Answer(
        rank=rank,
        world=world,
        began=0.0,
        ends=ends,
        samples=[samples] * len(ends),
        losses=[1.0] * len(ends),
        held_bytes=0,
        peak_bytes=0,
        late=0.0,
    )


def figures(speed: float, accuracy: float = 0.9, peak: int = 100) -> StrategyFigures:
    return StrategyFigures(
        samples_per_s=speed,
        total_s=100 / speed,
        iteration=spread([64 / speed]),
        accuracy=accuracy,
        loss=0.1,
        losses=[0.1],
        late=0.0,
        held_bytes=[peak],
        peak_bytes=[peak],
    )


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_gradient_is_the_same_however_samples_are_split_over_workers(name: str) -> None:
    model = make(name, SHAPE, 8, seed=1)
    x, y = torch.randn(8, *SHAPE), torch.randint(10, (8,))

    def gradient(which: slice) -> torch.Tensor:
        model.zero_grad()
        F.cross_entropy(model(x[which]), y[which]).backward()
        return torch.cat([value.grad.flatten() for value in model.parameters() if value.grad is not None])

    whole = gradient(slice(8)).clone()
    parts = (gradient(slice(4)).clone() + gradient(slice(4, 8))) / 2
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_seed_makes_the_same_units_with_parameters_in_each(name: str) -> None:
    one, two = make(name, SHAPE, 8, seed=3), make(name, SHAPE, 8, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert all(parameter_bytes(unit) > 0 for unit in one)
    assert activation_bytes(one, torch.zeros(8, *SHAPE)) > activation_bytes(one, torch.zeros(4, *SHAPE)) > 0


def test_the_order_of_samples_is_a_permutation_per_epoch_and_the_seeds_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    data = digits()
    one, two = (load_file(data.in_order(len(data.y), seed, tmp_path))["y"] for seed in (0, 1))
    assert torch.equal(one.sort().values, data.y.sort().values)
    assert not torch.equal(one, two)


@settings(max_examples=30)
@given(
    pace=st.lists(st.floats(0.01, 0.5), min_size=1, max_size=4),
    rounds=st.integers(20, 40),
    warm=st.integers(0, 8),
)
def test_the_rate_of_independent_workers_is_about_the_sum_of_their_own(
    pace: list[float], rounds: int, warm: int
) -> None:
    until = rounds * max(pace)
    answers = [
        answer(rank, [each * (at + 1) for at in range(int(until / each))]) for rank, each in enumerate(pace)
    ]
    expected = sum(8 / each for each in pace)
    assert rate(answers, 8 * warm) == pytest.approx(expected, rel=0.2)
    assert all(min(pace) * 0.99 <= gap <= max(pace) * 1.01 for gap in gaps(answers, 8 * warm))


def test_warming_up_does_not_count() -> None:
    slow_start = answer(0, [10.0, 11.0, 12.0, 13.0])
    assert rate([slow_start], 8) == pytest.approx(8.0)
    with pytest.raises(RunError, match="warmed up"):
        rate([slow_start], 32)


def test_a_world_of_another_size_is_no_result() -> None:
    check_world("ddp", [answer(0, [1.0]), answer(1, [1.0])], 2)
    with pytest.raises(RunError, match=r"world of 2, and its workers saw \[1, 1\]"):
        check_world("ddp", [answer(0, [1.0], world=1), answer(1, [1.0], world=1)], 2)
    with pytest.raises(RunError, match=r"saw \[2\]"):
        check_world("ddp", [answer(0, [1.0])], 2)


def traced(schedule: Schedule, rule: BoundedPS) -> list[AnyEvent]:
    """The run as a trace has it."""
    events: list[AnyEvent] = []
    for number, step in enumerate(drive(rule, schedule)):
        t, pushed = float(number), step.worker if step.event == "push" else None
        if step.event == "join":
            events.append(WorkerJoined(t, step.worker))
        if step.event == "finished":
            events.append(WorkerLeft(t, step.worker, "finished"))
        version, released = step.decision.version, tuple(step.released)
        events.append(Decided(t, number, pushed, version, release=released))
    return events


@settings(max_examples=30)
@given(schedule=schedules(churn=False), staleness=st.integers(0, 2), resync=st.integers(1, 4))
def test_waiting_has_one_of_two_causes_and_without_one_the_other_has_all(
    schedule: Schedule, staleness: int, resync: int
) -> None:
    both = traced(schedule, BoundedPS(staleness, resync))
    waiting, total, last = set[int](), 0.0, 0.0
    for event in both:
        assert isinstance(event, Decided | WorkerJoined | WorkerLeft)
        total, last = total + len(waiting) * (event.t - last), event.t
        if isinstance(event, Decided):
            waiting |= {event.pushed} if event.pushed is not None else set()
            waiting -= set(event.release)
        else:
            waiting.discard(event.worker)
    seen = waits_of(both, resync)
    assert seen.bound_s + seen.resync_s == pytest.approx(total)
    assert waits_of(traced(schedule, BoundedPS(staleness, 0)), 0).resync_s == 0
    assert waits_of(traced(schedule, BoundedPS(None, resync)), resync).bound_s == 0


def test_patterns_choose_cells_and_a_wrong_one_is_named() -> None:
    assert [cell.name for cell in chosen_cells(["vgg-2-throttled-x2"])] == ["vgg-2-throttled-x2"]
    assert chosen_cells(["*"]) == every_cell()
    assert left_out(chosen_cells(["*"])) == 0
    assert chosen_cells(())[0] == Cell("resnet", 4), "rates are tried in the first"
    assert {cell.model for cell in chosen_cells(())} == set(MODELS)
    with pytest.raises(ConfigError, match="no cell is called 'vgg-3-native-none'"):
        check(BenchPlan(cells=("vgg-3-native-none",)))
    with pytest.raises(ConfigError, match="Did you mean 'ps-async'"):
        check(BenchPlan(protocols=("ps-asynk",)))


def test_names_of_cells_are_their_own() -> None:
    names = [cell.name for cell in every_cell()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "strategy", [each for each in STRATEGIES.values() if each.protocol], ids=lambda s: s.name
)
def test_every_protocol_of_the_roster_exists_with_its_settings(strategy: Strategy) -> None:
    assert strategy.protocol is not None
    make_any(strategy.protocol, {key: str(value) for key, value in strategy.settings.items()})
    assert strategy.flags[:2] == ["--protocol", strategy.protocol]


def test_all_try_equally_many_rates_and_keep_the_best() -> None:
    results = outcome.StrategyResults(None)
    whole = of_series(chosen_strategies(["ps-async"]), Setup())
    tried = {each.name: whole.tried(each) for each in whole.strategies}
    assert {len(jobs) for jobs in tried.values()} == {5}
    for job in tried["ps-async"]:
        results.add(StrategyOutcome(job=job, figures=figures(1.0, accuracy=0.9 if job.lr == 0.05 else 0.5)))
    assert whole.lr(STRATEGIES["ps-async"], results) == 0.05


def test_a_row_says_if_its_rate_is_the_lowest_or_highest_that_was_tried() -> None:
    whole = of_series(chosen_strategies(["ps-async", "asp"]), Setup())
    remarks, best = {}, {"ddp": 0.05, "ps-async": 0.001, "asp": 0.01}
    results = outcome.StrategyResults(None)
    for each in whole.strategies:
        for job in whole.tried(each):
            accuracy = 0.9 if job.lr == best.get(each.name, 0.02) else 0.5
            results.add(StrategyOutcome(job=job, figures=figures(1.0, accuracy=accuracy)))
    measured = [whole.measured(whole.cells[0], each, results) for each in whole.strategies]
    for row in tables(ResultGrid(measured, whole.setup, Loads(whole.setup, SHAPE))):
        if row.table[:2] == "T3":
            remarks[row.case["strategy"]] = row.remark
    assert remarks["ddp"] == "its best rate is the highest of those tried"
    assert remarks["ps-async"] == "its best rate is the lowest of those tried"
    assert remarks["asp"] == remarks["ps-sync"] == ""


def test_who_cannot_run_where_rates_are_tried_has_the_rate_of_one_that_makes_the_same_steps() -> None:
    results = outcome.StrategyResults(None)
    whole = of_series(chosen_strategies(["bsp+store_hosts"]), Setup())
    for job in whole.tried(STRATEGIES["ps-sync"]):
        results.add(StrategyOutcome(job=job, figures=figures(1.0, accuracy=0.9 if job.lr == 0.05 else 0.5)))
    assert whole.tried(STRATEGIES["bsp+store_hosts"]) == []
    assert whole.lr(STRATEGIES["bsp+store_hosts"], results) == 0.05
    assert whole.total == 5 * 3 + 3, "five rates of the three others, and their second seed"


def of_series(
    strategies: list[Strategy], setup: Setup, cells: tuple[str, ...] = ("vgg-4-native-none",)
) -> StrategySeries:
    return StrategySeries(
        cells=chosen_cells(cells),
        strategies=strategies,
        seeds=(0, 1),
        setup=setup,
        data="digits",
        version="1",
    )


def test_what_is_known_is_not_run_again_but_what_failed_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def runs(strategy: Strategy, request: StrategyRequest) -> Ran:
        asked.append(strategy.name)
        if strategy.name == "ddp":
            raise RunError("gone")
        ends = [float(at) for at in range(1, 20)]
        return Ran(
            [answer(rank, ends, world=request.workers) for rank in range(request.workers)], tmp_path, None
        )

    monkeypatch.setattr(series_module, "run_here", runs)
    said: list[str] = []
    whole = of_series(chosen_strategies(["single"]), QUICK, ("vgg-2-memory",))
    for expected in (["single", "ddp", "ps-sync"], ["ddp"]):
        asked.clear()
        results = outcome.StrategyResults(tmp_path / "kept.jsonl")
        run_all(Runner(whole, digits(), results, said.append).experiment(list), said.append)
        assert asked == expected
    assert "did not run: gone" in said[-1]
    assert whole.measured(whole.cells[0], STRATEGIES["ddp"], results).trouble == "gone"
    assert "(3 of 3)" in said[2]


def test_a_store_on_all_hosts_is_for_cells_that_have_so_many() -> None:
    spread = STRATEGIES["bsp+store_hosts"]
    cells = (Cell("vgg", 4, "throttled"), Cell("vgg", 4, "native"), Cell("vgg", 2, "throttled"))
    assert [spread.takes(cell) for cell in cells] == [True, False, False]
    assert spread.flags == ["--protocol", "bsp", "--store-hosts", "4"]


@pytest.mark.parametrize("name", ["allreduce+int8", "local_sgd"])
def test_what_is_for_slow_links_takes_part_there_only(name: str) -> None:
    cells = (Cell("vgg", 4, "throttled"), Cell("vgg", 4, "native"), Cell("vgg", 2, "throttled"))
    assert [STRATEGIES[name].takes(cell) for cell in cells] == [True, False, True]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[StrategyOutcome]]:
    """The smallest part of the quick form: five strategies in one cell, with real processes."""
    kept = tmp_path_factory.mktemp("kept") / "results.jsonl"
    plan = BenchPlan(
        quick=True, cells=("vgg-2-native-none",), protocols=("fsdp", "ps-async-mod"), results=str(kept)
    )
    return run("strategies", plan, say=lambda text: None), read_kept(kept, StrategyOutcome)


@pytest.mark.timeout(300)
def test_synchronous_strategies_train_alike_and_shards_add_up_to_one_model(
    quick_run: tuple[Any, list[StrategyOutcome]],
) -> None:
    record, outcomes = quick_run
    seen = {each.job.strategy: each.figures for each in outcomes}
    assert not [each.trouble for each in outcomes if each.trouble]
    assert set(seen) == {"single", "ddp", "fsdp", "ps-sync", "ps-async-mod"}
    one = seen["single"]
    for name in ("ddp", "fsdp", "ps-sync"):
        assert seen[name].accuracy == one.accuracy
    assert sum(seen["fsdp"].held_bytes) == one.held_bytes[0]
    assert seen["ps-sync"].server_bytes is not None
    assert seen["ddp"].server_bytes is None
    load = Loads(QUICK, SHAPE).of(Cell("vgg", 2, "throttled"), 1.0)
    for name in ("single", "ddp", "ps-sync"):
        assert max(seen[name].held_bytes) == state_bytes(name, load)
    assert seen["ps-sync"].staleness.max == 0
    assert seen["ps-async-mod"].staleness.max <= (2 - 1) * (2 * 2 + 1)
    assert record.plots.keys() == {"speed"}
    assert {row.table[:2] for row in record.rows} >= {"T1", "T3", "Fi", "Ad"}


@pytest.mark.long  # every kind of cell, throttled links where there is root
@pytest.mark.timeout(600)
def test_the_quick_form_runs_every_kind_of_cell() -> None:
    cells = (
        "vgg-1-native-none",
        "vgg-2-native-x2",
        "vgg-2-native-paused",
        "vgg-2-throttled-none",
        "vgg-2-real",
        "vgg-2-memory",
    )
    record = run("strategies", BenchPlan(quick=True, cells=cells), say=lambda text: None)
    remarks = [row.remark for row in record.rows if row.table[:2] in ("T1", "T2", "T4") and row.value is None]
    assert not [text for text in remarks if "figure" not in text and text]
    assert {row.table[:2] for row in record.rows} >= {"T1", "T2", "T3"}
