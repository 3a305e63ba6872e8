"""The table of the benchmark of a small cluster: medians, best rates, and a series that was interrupted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline_bench.cluster.course import Figures, Reached
from paceline_bench.cluster.entries import Entry, entries, parse_entry
from paceline_bench.cluster.results import Job, Outcome, Results, job_of
from paceline_bench.cluster.scene import SCENES, Scene
from paceline_bench.cluster.series import Series, on_hosts
from paceline_bench.cluster.table import rows_of
from paceline_bench.experiment import carried_out
from paceline_bench.harness.bar import Bar
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import BenchRow

SCENE: Scene = msgspec.structs.replace(
    SCENES["unequal"], targets=(0.3, 0.5), limit_s=10.0, device_s=1.0, batch=8
)
FIGURES = Figures(
    seconds=20.0,
    samples_per_s=100.0,
    waiting=0.25,
    accuracy=0.5,
    best=0.5,
    reached=(Reached(0.3, 20.0, 2000), Reached(0.5, 40.0, 4000)),
    late=0.0,
    ranks=frozenset(range(4)),
)


def series(*names: str, scene: Scene = SCENE, rates: tuple[float, ...] = (), seeds: int = 1) -> Series[Entry]:
    return Series(scene, entries(names), rates, tuple(range(seeds)), False, "1")


def outcome(lr: float, seed: int, *seconds: float) -> Figures:
    """Of a run that needs so many seconds per target; none: it did not get there."""
    reached = tuple(Reached(t, s, round(100 * s)) for t, s in zip(SCENE.targets, seconds, strict=False))
    return msgspec.structs.replace(FIGURES, reached=reached)


class Told:
    """Hosts on which runs take as long as they are told to, or fail."""

    def __init__(self, seconds: dict[tuple[str, float, int], tuple[float, ...] | str]) -> None:
        self.seconds = seconds
        self.made: list[tuple[str, float, int]] = []

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def run(self, job: Job, entry: Entry, bar: Bar) -> Outcome:
        key = (job.entry, job.lr, job.seed)
        self.made.append(key)
        told = self.seconds[key]
        if isinstance(told, str):
            return Outcome(job=job, figures=None, trouble=told)
        return Outcome(job=job, figures=outcome(job.lr, job.seed, *told), slow_link_bytes=5_000_000)


def table(what: Series[Entry], hosts: Told, results: Results | None = None) -> list[BenchRow]:
    results = Results(None) if results is None else results
    experiment = on_hosts(
        "cluster",
        [what],
        results,
        lambda each, folder: hosts,
        lambda outcome, scene: "",
        lambda: rows_of(what, results),
    )
    return carried_out(experiment, BenchPlan(), lambda text: None)


def test_twice_as_soon_as_ddp_is_a_ratio_of_two_at_each_target() -> None:
    hosts = Told({("ddp", 0.06, 0): (20.0, 40.0), ("asp", 0.06, 0): (10.0, 40.0)})
    rows = table(series("asp"), hosts)
    assert [(row.case["protocol"], row.case["to"], row.value) for row in rows] == [
        ("ddp", "30 %", 1.0),
        ("ddp", "50 %", 1.0),
        ("asp", "30 %", 2.0),
        ("asp", "50 %", 1.0),
    ]
    assert rows[2].case["MB over the slow link"] == 5.0
    assert (rows[2].target, rows[2].met, rows[0].target) == (2.2, False, None)


def test_the_figure_is_of_medians_and_ranges_are_told() -> None:
    times = {("ddp", 0.06, n): (20.0, 30.0) for n in range(3)}
    times |= {("asp", 0.06, n): (t, 30.0) for n, t in enumerate((30.0, 10.0, 8.0))}
    row = table(series("asp", seeds=3), Told(times))[2]
    assert (row.value, row.case["time"], row.case["seeds"]) == (2.0, "10.0 s (8.0-30.0)", 3)


def test_the_first_seed_chooses_the_rate_and_ddp_keeps_its_own() -> None:
    times: dict[tuple[str, float, int], tuple[float, ...] | str] = {
        ("ddp", 0.06, n): (20.0, 30.0) for n in (0, 1)
    }
    times |= {("asp", 0.03, 0): (9.0,), ("asp", 0.09, 0): (10.0, 20.0), ("asp", 0.09, 1): (12.0, 22.0)}
    hosts = Told(times)
    row = table(series("asp", rates=(0.03, 0.09), seeds=2), hosts)[2]
    assert set(hosts.made) == set(times)
    assert (row.case["lr"], row.case["rates tried"]) == (0.09, "0.03: 9.0 s, 0.09: 10.0 s")
    assert row.case["time"] == "11.0 s (10.0-12.0)"


def test_a_target_that_was_not_reached_by_a_seed_has_no_figure() -> None:
    times = {("ddp", 0.06, n): (20.0, 30.0) for n in (0, 1)}
    times |= {("ssp", 0.06, 0): (20.0, 30.0), ("ssp", 0.06, 1): (20.0,)}
    row = table(series("ssp", seeds=2), Told(times))[3]
    assert row.value is None
    assert row.case["time"] == "30.0 s; not reached by 1 of 2"
    assert row.remark == "best accuracy 50.0 % in 20 s"


def test_what_was_refused_is_a_row_that_says_why() -> None:
    why = "peer protocols do not work through a store"
    row = table(series("osp"), Told({("ddp", 0.06, 0): (20.0, 30.0), ("osp", 0.06, 0): why}))[2]
    assert (row.case["time"], row.value, row.remark) == ("did not run", None, why)


def test_final_accuracy_is_compared_in_points_and_time_as_a_ratio() -> None:
    scene = msgspec.structs.replace(SCENE, targets=(), epochs=1)
    results, what = Results(None), series("asp", scene=scene)
    for entry, seconds, accuracy in (("ddp", 40.0, 0.58), ("asp", 20.0, 0.57)):
        job = job_of(scene, parse_entry(entry).title, 0.06, 0, False, "1")
        figures = msgspec.structs.replace(FIGURES, seconds=seconds, accuracy=accuracy, reached=())
        results.add(Outcome(job=job, figures=figures))
    row = rows_of(what, results)[1]
    assert (row.value, row.case["points against ddp"], row.case["near"]) == (2.0, "-1.00", "no")


def test_a_rank_that_took_no_part_is_missed() -> None:
    results, job = Results(None), job_of(SCENE, "ddp", 0.06, 0, False, "1")
    results.add(Outcome(job=job, figures=msgspec.structs.replace(FIGURES, ranks=frozenset({0}))))
    assert "only ranks [0] took part" in rows_of(series("ddp"), results)[0].remark


def test_an_interrupted_series_goes_on_where_it_was(tmp_path: Path) -> None:
    """Neither what is known nor what has failed for good is lost; a line that was cut off is made again."""
    file, what = tmp_path / "results.jsonl", series("asp", "ssp")
    times = {(name, 0.06, 0): (20.0, 30.0) for name in ("ddp", "asp", "ssp")}
    first = table(what, Told(times | {("asp", 0.06, 0): "a host was lost"}), Results(file))
    assert "a host was lost" in first[2].remark
    file.write_bytes(file.read_bytes()[:-5])  # the last line is ssp's
    hosts = Told(times)
    rows = table(what, hosts, Results(file))
    assert hosts.made == [("asp", 0.06, 0), ("ssp", 0.06, 0)]
    assert [row.value for row in rows] == [1.0] * 6
    again = Told({})
    assert table(what, again, Results(file)) == rows
    assert again.made == []


def test_a_scene_that_was_changed_is_run_again(tmp_path: Path) -> None:
    file, times = tmp_path / "results.jsonl", {("ddp", 0.06, 0): (20.0, 30.0)}
    table(series("ddp"), Told(times), Results(file))
    hosts = Told(times)
    table(series("ddp", scene=msgspec.structs.replace(SCENE, every=512)), hosts, Results(file))
    assert hosts.made == [("ddp", 0.06, 0)]


def test_a_run_that_has_waited_for_more_serves_and_one_for_less_does_not(tmp_path: Path) -> None:
    file, times = tmp_path / "results.jsonl", {("ddp", 0.06, 0): (20.0, 30.0)}
    table(series("ddp"), Told(times), Results(file))
    sooner, later = (msgspec.structs.replace(SCENE, targets=targets) for targets in ((0.3,), (0.3, 0.6)))
    hosts = Told(times)
    [row] = table(series("ddp", scene=sooner), hosts, Results(file))
    assert (row.case["time"], hosts.made) == ("20.0 s", [])
    table(series("ddp", scene=later), hosts, Results(file))
    assert hosts.made == [("ddp", 0.06, 0)]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"line 1 of .* is no result of a run"):
        Results(tmp_path / "results.jsonl")
