"""What the benchmark of strategies tells: tables, findings, pictures, advice scored by what was measured."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from paceline.plan.profile.cluster import KINDS
from paceline.plan.strategy import Constraints, advise
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import spread
from paceline_bench.strategies.cells import Cell, Setup
from paceline_bench.strategies.outcome import MeasuredStrategy, StrategyFigures
from paceline_bench.strategies.roster import STRATEGIES
from paceline_bench.strategies.told import formulas
from paceline_bench.strategies.told.best import best_rows
from paceline_bench.strategies.told.findings import FINDINGS, findings, findings_of
from paceline_bench.strategies.told.formulas import Loads
from paceline_bench.strategies.told.plots import plots
from paceline_bench.strategies.told.scoring import accurate, advice_rows, strategy_of
from paceline_bench.strategies.told.tables import T1, T2, T3, T4, ResultGrid, tables

SHAPE = (1, 8, 8)
CELL = Cell("vgg", 4)
SHORT = Cell("vgg", 4, kind="memory")


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


def measured(cell: Cell, name: str, *seen: StrategyFigures) -> MeasuredStrategy:
    return MeasuredStrategy(cell=cell, strategy=STRATEGIES[name], lr=0.1, figures=list(seen))


def grid(*each: MeasuredStrategy) -> ResultGrid:
    """Cells that are throttled or for memory need no measured collectives."""
    return ResultGrid(each, Setup(), Loads(Setup(), SHAPE))


@pytest.mark.parametrize(
    ("letter", "inside", "outside"),
    [
        ("a", 2.5, 3.5),
        ("b", 0.2, 0.5),
        ("c", 5.0, 0.9),
        ("d", 0.28, 0.4),
        ("e", 4.0, 3.9),
        ("f", -0.05, 0.06),
    ],
)
def test_a_finding_is_in_or_out_by_the_published_figure(letter: str, inside: float, outside: float) -> None:
    [finding] = [each for each in FINDINGS if each.what.startswith(letter)]
    assert finding.holds(inside)
    assert not finding.holds(outside)


def test_findings_come_from_what_was_measured_and_say_what_was_not() -> None:
    seen = grid(
        *(measured(CELL, name, figures(speed)) for name, speed in (("single", 100), ("ddp", 250))),
        measured(CELL, "ps-sync", figures(200)),
        measured(CELL, "ps-async", figures(250, accuracy=0.8)),
    )
    rows = {str(row.case["finding"])[0]: row.case for row in findings(seen)}
    assert rows["a"]["compared"] == 2.5
    assert rows["d"]["compared"] == 0.2
    assert rows["e"]["compared"] == 10
    assert {rows[letter]["published range"] for letter in "ade"} == {"in"}
    assert {rows[letter]["published range"] for letter in "bcf"} == {"not measured"}


def test_the_speed_up_of_one_worker_is_one_and_a_failed_strategy_has_a_row_without_figures() -> None:
    failed = msgspec.structs.replace(measured(CELL, "fsdp"), trouble="out of memory")
    rows = [row for row in tables(grid(measured(CELL, "single", figures(50)), failed)) if row.table == T1]
    assert [(row.value, row.remark) for row in rows] == [(1.0, ""), (None, "out of memory")]


@pytest.mark.parametrize(("speed", "marked"), [(209.0, False), (212.0, True)])
def test_more_than_the_number_of_workers_times_as_fast_is_marked(speed: float, marked: bool) -> None:
    seen = tables(grid(measured(CELL, "single", figures(50)), measured(CELL, "ddp", figures(speed))))
    assert ("do not trust it" in seen[1].remark) is marked


def test_pictures_are_whole_documents_with_a_bar_for_every_figure() -> None:
    rows = tables(grid(measured(CELL, "single", figures(50)), measured(CELL, "ddp", figures(100))))
    pictures = plots(rows)
    assert set(pictures) == {"speed"}
    root = ElementTree.fromstring(pictures["speed"])
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 2


@pytest.mark.parametrize(
    ("wanted", "slow", "runs"),
    [
        (Constraints(), {}, "allreduce"),
        (Constraints(memory_bytes=1_560_000), {}, "fsdp"),
        (Constraints(hosts=4), {}, "ddp"),
        (Constraints(tolerance=5), {3: 4.0}, "asp"),
        (Constraints(), {3: 4.0}, "bsp+balance"),
        (Constraints(preemptible=True), {}, "backup_bsp"),
    ],
)
def test_the_command_of_an_advice_is_one_of_the_roster(
    wanted: Constraints, slow: dict[int, float], runs: str
) -> None:
    load = Loads(Setup(mbit=1e6), SHAPE).of(Cell("vgg", 4, "throttled"), 0.16)
    seconds = tuple(each * slow.get(rank, 1.0) for rank, each in enumerate(load.seconds))
    advice = advise(msgspec.structs.replace(load, seconds=seconds), wanted)
    assert strategy_of(advice.command) == runs
    assert runs in STRATEGIES


@pytest.mark.parametrize(("ours", "right", "loses"), [(96.0, "yes", 0.04), (80.0, "no", 0.2)])
def test_advice_is_right_if_it_is_nearly_the_fastest_of_what_is_accurate_enough(
    ours: float, right: str, loses: float
) -> None:
    cell = Cell("vgg", 4, "throttled")
    seen = grid(
        measured(cell, "ddp", figures(ours)),
        measured(cell, "allreduce", figures(70)),
        measured(cell, "fsdp", figures(100)),
        measured(cell, "ps-async-sum", figures(900, accuracy=0.5)),
    )
    row, *_, total = advice_rows(seen)
    assert (row.case["runs"], row.case["best"], row.case["right"]) == ("ddp", "fsdp", right)
    assert row.value == pytest.approx(loses)
    assert total.value == (1.0 if right == "yes" else 0.0)
    [best] = best_rows(seen)
    assert best.value == pytest.approx(70 / 100)


def test_what_makes_the_same_steps_loses_nothing_and_shows_what_is_chance() -> None:
    """All-reduce is 3 points off DDP by rounding, so 3 points say nothing against asynchrony either."""
    cell = Cell("vgg", 4, "native")
    seen = grid(
        measured(cell, "ddp", figures(90, accuracy=0.80)),
        measured(cell, "allreduce", figures(95, accuracy=0.77)),
        measured(cell, "asp", figures(200, accuracy=0.775)),
        measured(cell, "ps-async", figures(300, accuracy=0.76)),
    )
    assert set(accurate(seen, cell, 0.0)) == {"ddp", "allreduce", "asp"}
    assert set(accurate(seen, cell, 1.5)) == {"ddp", "allreduce", "asp", "ps-async"}


def rows_of(table: str, seen: ResultGrid) -> dict[object, BenchRow]:
    return {row.case["strategy"]: row for row in tables(seen) if row.table == table}


def test_a_server_has_a_row_beside_its_workers_and_memory_of_both_counts_once() -> None:
    served = msgspec.structs.replace(figures(1, peak=60 << 20), server_bytes=140 << 20, shared_bytes=40 << 20)
    seen = grid(measured(SHORT, "ddp", figures(1, peak=80 << 20)), measured(SHORT, "ps-sync", served))
    rows = rows_of(T2, seen)
    assert list(rows) == ["ddp", "ps-sync", "ps-sync's server"]
    assert [row.value for row in rows.values()] == [1.0, 0.75, 1.75]
    server = rows["ps-sync's server"].case
    assert (server["in common with a worker"], server["first host, both"]) == ("40.00 MiB", "160.00 MiB")
    three_copies = 3 * Loads(Setup(), SHAPE).of(SHORT, 1.0).parameters
    assert server["peak over formula"] == f"{(140 << 20) / three_copies:.2f}"


@pytest.mark.parametrize(
    ("server_bytes", "best"), [(30 << 20, "ps-sync"), (140 << 20, "fsdp"), (None, "fsdp")]
)
def test_where_memory_is_short_a_server_needs_room_beside_the_first_worker(
    server_bytes: int | None, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"latency_s": 1e-4, "bytes_per_s": 1e9}
    monkeypatch.setattr(formulas, "probe", lambda workers: dict.fromkeys(KINDS, line))
    peaks = {"ddp": 80 << 20, "fsdp": 50 << 20, "ps-sync": 55 << 20}
    held = {name: figures(1, peak=peak) for name, peak in peaks.items()}
    held["ps-sync"] = msgspec.structs.replace(
        held["ps-sync"], server_bytes=server_bytes, shared_bytes=25 << 20
    )
    speeds = {"ddp": 300, "fsdp": 100, "ps-sync": 200}
    rows = advice_rows(
        grid(
            *(measured(CELL, name, figures(speed)) for name, speed in speeds.items()),
            *(measured(SHORT, name, each) for name, each in held.items()),
        )
    )
    [short] = [row for row in rows if "MiB" in str(row.case.get("wish"))]
    assert short.case["best"] == best
    assert short.case["wish"] == "65 MiB a host, all 4 workers used"


@pytest.mark.parametrize(
    ("name", "steps", "vectors"),
    [
        ("ddp", 80, 1.5),
        ("ps-sync", 80, 1.0),
        ("allreduce", 80, 1.0),
        ("bsp+store_hosts", 80, 1.5),
        ("allreduce+int8", 80, 0.5),
        ("local_sgd", 80, 0.25),
        ("asp", 50, 1.0),
        ("asp", None, 1.0),
    ],
)
def test_bytes_are_those_of_the_steps_that_the_last_host_made(
    name: str, steps: int | None, vectors: float
) -> None:
    cell = Cell("vgg", 4, "throttled")
    moved = round(2 * (steps or 80) * vectors * Loads(Setup(), SHAPE).of(cell, 0.16).parameters)
    sent = msgspec.structs.replace(figures(100), wire_bytes=moved, last_steps=steps)
    row = rows_of(T4, grid(measured(cell, name, sent)))[name]
    assert row.case["sent over formula"] == "1.00"


def test_rows_say_how_many_runs_they_have_and_how_many_more_diverged() -> None:
    some = msgspec.structs.replace(measured(CELL, "ps-async", figures(90), figures(95)), diverged=1)
    none = msgspec.structs.replace(measured(CELL, "ps-async-sum"), diverged=2)
    seen = grid(measured(CELL, "ps-sync", figures(100)), some, none)
    for table in (T1, T3):
        rows = rows_of(table, seen)
        assert [row.case["seeds"] for row in rows.values()] == [1, 2, 0]
        assert rows["ps-async"].remark.startswith("1 of 3 diverged, which counts as 10 % accuracy")
        assert "2 of 2 diverged" in rows["ps-async-sum"].remark


def test_accuracy_lost_is_the_middle_of_all_cells_for_either_weight() -> None:
    cells = [Cell(model, 4, "throttled") for model in ("vgg", "resnet", "densenet")]
    lost = {"ps-async": (0.05, 0.08, 0.60), "ps-async-sum": (0.3, 0.4, 0.5)}
    seen = grid(
        *(measured(cell, "ps-sync", figures(100)) for cell in cells),
        *(
            measured(cell, name, figures(100, accuracy=0.9 - less))
            for name, each in lost.items()
            for cell, less in zip(cells, each, strict=True)
        ),
    )
    [row] = [row for row in findings(seen) if str(row.case["finding"]).startswith("e")]
    assert (row.case["compared"], row.case["published range"]) == (8, "in")
    mean, whole = "8.00 points (5.00 to 60.00 in 3 cells)", "40.00 points (30.00 to 50.00 in 3 cells)"
    assert str(row.case["ours"]).startswith(f"weight 1/N: {mean}; weight 1: {whole}")


def test_no_gain_was_published_so_one_cell_with_a_gain_or_a_loss_is_out() -> None:
    cells = [Cell(model, 4, "throttled") for model in ("vgg", "resnet", "densenet")]

    def row(*speeds: float) -> BenchRow:
        timed = (
            measured(cell, name, figures(speed))
            for cell, ours in zip(cells, speeds, strict=True)
            for name, speed in (("ps-sync", 100), ("ps-async-mod", ours))
        )
        [found] = [each for each in findings(grid(*timed)) if str(each.case["finding"]).startswith("f")]
        return found

    none, gain, loss = row(102, 98, 104), row(102, 100, 129), row(60, 100, 101)
    assert [each.case["published range"] for each in (none, gain, loss)] == ["in", "out", "out"]
    assert gain.case["compared"] == 0.29
    told = "+0.29 of ps-sync's samples/s in densenet-4-throttled-none; +0.00 to +0.02 in 2 others"
    assert gain.case["ours"] == told


def test_a_record_whose_finding_was_the_median_is_judged_by_its_cells_again() -> None:
    cells = [Cell(model, 4, "throttled") for model in ("vgg", "resnet", "densenet")]
    seen = grid(
        *(measured(cell, "single", figures(50)) for cell in cells),
        *(measured(cell, "ps-sync", figures(100)) for cell in cells),
        *(
            measured(cell, "ps-async-mod", figures(speed))
            for cell, speed in zip(cells, (101, 102, 129), strict=True)
        ),
    )
    kept = findings(seen)
    median = [
        msgspec.structs.replace(row, case=row.case | {"compared": 0.02, "published range": "in"})
        if str(row.case["finding"]).startswith("f")
        else row
        for row in kept
    ]
    assert findings_of([*median, *tables(seen)]) == kept
    assert findings_of(median) == median


def test_a_run_that_diverged_counts_as_chance_in_what_is_lost() -> None:
    gone = msgspec.structs.replace(measured(CELL, "ps-async"), diverged=1, trouble="NaN or infinity")
    half = msgspec.structs.replace(measured(CELL, "ps-async-sum", figures(9, accuracy=0.5)), diverged=1)
    seen = grid(measured(CELL, "ps-sync", figures(100)), gone, half)
    [row] = [row for row in findings(seen) if str(row.case["finding"]).startswith("e")]
    assert row.case["compared"] == 80
    assert "weight 1: 60.00 points" in str(row.case["ours"])
    assert str(row.case["ours"]).endswith("2 of 3 runs diverged and count as 10 % accuracy")
