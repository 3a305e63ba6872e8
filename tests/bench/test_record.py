"""Records hold what is needed to believe them; a new one replaces that of its question, and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from paceline.errors import ConfigError
from paceline_bench.cluster.cluster import record_name
from paceline_bench.harness import machine
from paceline_bench.harness.machine import OthersWork, copy_bandwidth, look_around, memory_limit_s
from paceline_bench.harness.plan import BenchPlan
from paceline_bench.harness.record import (
    BenchRecord,
    BenchRow,
    as_page,
    as_table,
    as_tables,
    read_record,
    write_record,
)
from paceline_bench.harness.run import chosen, shown_command
from paceline_bench.harness.stats import Interval, paired_ratio, ratio_of_medians, spread
from support.runs import wait_until


def row(value: float = 6.0, target: float | None = 5.0) -> BenchRow:
    """Twice as slow as memory allows, six times as fast as the peer."""
    return BenchRow(
        case={"MB": 100, "workers": 2},
        measured={"paceline": spread([0.01, 0.02, 0.03]), "gloo": spread([0.1, 0.12, 0.14])},
        figure="speedup",
        value=value,
        interval=Interval(5.5, 6.5),
        target=target,
        limit_s=0.01,
    )


def record(rows: list[BenchRow]) -> BenchRecord:
    return BenchRecord(
        name="exchange",
        question="How long?",
        date="2030-01-02",
        command="paceline bench exchange",
        seed=7,
        quick=False,
        machine=look_around({"100 MB": 2e10}),
        rows=rows,
    )


def test_a_page_names_command_hardware_versions_seed_and_distance_to_the_limit(tmp_path: Path) -> None:
    page = write_record(tmp_path, record([row()])).read_text()
    for needed in ("paceline bench exchange", "cores", "torch 2", "seed: 7", "20.0 GB/s", "6.0x", ">= 5.0x"):
        assert needed in page
    assert "| 10.00 ms | 2.0 |" in page


def test_the_json_beside_the_page_reads_back_as_the_same_record(tmp_path: Path) -> None:
    kept = record([row(), row(4.0)])
    page = write_record(tmp_path, kept)
    read = msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=BenchRecord)
    assert read == kept
    assert [r.met for r in read.rows] == [True, False]


def test_a_record_replaces_the_older_one_of_its_question_with_its_pictures_and_no_other(
    tmp_path: Path,
) -> None:
    write_record(tmp_path, msgspec.structs.replace(record([row()]), plots={"speed": "<svg/>"}))
    write_record(tmp_path, msgspec.structs.replace(record([row()]), name="store"))
    page = write_record(tmp_path, record([row(4.0)]))
    assert "4.0x" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("exchange.json", "exchange.md", "store.json", "store.md")
    ]


def recipes(date: str, values: dict[str, float | None]) -> BenchRecord:
    """A run of some parts; None: one that was not tried."""
    rows = [
        msgspec.structs.replace(
            row(value or 0.0), case={"recipe": name}, value=value, tried=value is not None
        )
        for name, value in values.items()
    ]
    return msgspec.structs.replace(record(rows), date=date, command=f"on {date}", part="recipe")


def test_a_part_that_was_not_tried_again_stays_with_the_run_it_is_from(tmp_path: Path) -> None:
    write_record(tmp_path, recipes("2030-01-01", {"a": 1.0, "b": 2.0, "c": 3.0, "d": None}))
    write_record(tmp_path, recipes("2030-01-02", {"b": 20.0, "c": 30.0}))
    page = write_record(
        tmp_path,
        recipes("2030-01-03", {"e": 5.0, "b": None, "c": 300.0}),
        lambda rows: {"drawn": f"{len(rows)}"},
    )
    seen = read_record(page.with_suffix(".json"))
    assert {part: rows[0].value for part, rows in seen.parts().items()} == {
        "a": 1.0,
        "b": 20.0,
        "c": 300.0,
        "d": None,
        "e": 5.0,
    }
    assert {part: seen.run_of(part).date[-1] for part in seen.parts()} == {
        "a": "1",
        "b": "2",
        "c": "3",
        "d": "1",
        "e": "3",
    }
    assert [run.parts for run in seen.earlier] == [["a", "d"], ["b"]]
    for told in ("exchange, 2030-01-03", "Not tried again since 2030-01-01: a, d.", "`on 2030-01-02`"):
        assert told in page.read_text()
    assert (tmp_path / "exchange-drawn.svg").read_text() == "5", "pictures show all parts"


@pytest.mark.parametrize(
    ("figure", "value", "met"), [("speedup", 5.0, True), ("overhead", 5.1, False), ("seconds", 4.9, True)]
)
def test_speedups_must_reach_their_target_and_all_else_stay_below(
    figure: str, value: float, met: bool
) -> None:
    assert msgspec.structs.replace(row(value), figure=figure).met is met


def test_without_a_target_nothing_is_claimed() -> None:
    assert row(target=None).met is None


def test_a_value_that_nobody_knows_is_left_out_and_read_back_as_unknown(tmp_path: Path) -> None:
    kept = record([msgspec.structs.replace(row(), value=None, figure="ratio", measured={}, limit_s=None)])
    page = write_record(tmp_path, kept)
    assert msgspec.json.decode(page.with_suffix(".json").read_bytes(), type=BenchRecord) == kept
    assert kept.rows[0].met is None
    assert "| figure |" not in page.read_text()


def test_a_ratio_compares_medians_and_its_interval_holds_it() -> None:
    value, interval = ratio_of_medians([[4.0, 4.0], [4.0, 400.0]], [[2.0, 2.0], [2.0, 2.0]], seed=0)
    assert value == 2.0
    assert interval.low <= value <= interval.high


def test_a_slow_drift_cancels_out_of_paired_ratios() -> None:
    drift = [1.0, 2.0, 4.0, 8.0]
    assert paired_ratio([1.5 * x for x in drift], drift, seed=0) == (1.5, Interval(1.5, 1.5))


@pytest.mark.parametrize(("limit_s", "told"), [(0.019, "| no |"), (0.021, "| no: beyond the limit |")])
def test_a_target_that_the_limit_would_miss_is_said_to_be_beyond_it(
    tmp_path: Path, limit_s: float, told: str
) -> None:
    missed = msgspec.structs.replace(row(4.0, target=6.0), limit_s=limit_s)  # 6 times gloo's 120 ms: 20 ms
    assert told in write_record(tmp_path, record([missed])).read_text()


@pytest.mark.parametrize(("limit_s", "beyond"), [(0.1205, False), (0.1225, True)])
def test_the_same_of_an_overhead(limit_s: float, beyond: bool) -> None:
    measured = {"paceline": spread([0.13]), "plain PyTorch": spread([0.12])}
    overhead = BenchRow(case={}, measured=measured, figure="overhead", value=0.08, target=0.01)
    assert msgspec.structs.replace(overhead, limit_s=limit_s).beyond is beyond


def test_an_exchange_takes_its_bytes_a_word_there_and_back_and_every_workers_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert machine.round_trip_s(rounds=2) > 0
    assert machine.calls_s(rounds=2) > 0
    monkeypatch.setattr(machine, "copy_bandwidth", lambda size_bytes: 1000.0)
    monkeypatch.setattr(machine, "round_trip_s", lambda: 5.0)
    monkeypatch.setattr(machine, "calls_s", lambda: 0.25)
    assert machine.exchange_limit_s(1000, passes=2, workers=3) == 2.0 + 5.0 + 2 * 0.25


def test_the_memory_limit_is_bytes_over_bandwidth() -> None:
    assert memory_limit_s(100, passes=3, bytes_per_s=600) == 0.5
    assert copy_bandwidth(1 << 16, repeats=1) > 0


def test_rows_under_different_headings_stand_in_tables_of_their_own_columns() -> None:
    rows = [
        msgspec.structs.replace(row(), case={"bytes": 3}, table="T2"),
        msgspec.structs.replace(row(), case={"seconds": 4}, table="T1"),
        msgspec.structs.replace(row(), case={"bytes": 5}, table="T2"),
    ]
    text = "\n".join(as_tables(rows))
    second, first = text.index("## T2"), text.index("## T1")
    assert second < first
    assert "bytes" not in text[first:]
    assert text[:first].count("\n| ") == 4
    assert as_tables([row()]) == as_table([row()])


@pytest.mark.parametrize(("others", "marked"), [(None, False), (0.04, False), (0.3, True)])
def test_a_record_marks_what_others_did_meanwhile_and_tells_of_results_it_did_not_see(
    others: float | None, marked: bool
) -> None:
    seen = msgspec.structs.replace(record([row()]), others=others, kept=7)
    load = 0.0 if others is None else 3.0  # which may be of what the same command did before
    seen = msgspec.structs.replace(seen, machine=msgspec.structs.replace(seen.machine, load=load, cores=2))
    page = as_page(seen)
    assert ("**loaded**" in page) is marked
    assert ("% of its processors meanwhile" in page) is (others is not None)
    assert "7 results are of earlier commands, and this says nothing of their load" in page


def test_work_of_others_is_told_from_that_of_descendants(tmp_path: Path) -> None:
    """Both burn a second: one is started by this process, the other has lost its parent."""
    burn = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
    before, own = OthersWork(), machine._own_ticks()
    subprocess.run([sys.executable, "-c", burn], check=True)
    ours = machine._own_ticks() - own
    assert ours >= 0.95 * os.sysconf("SC_CLK_TCK"), "a child that has ended counts as this process's work"
    done = tmp_path / "done"
    orphan = f"{burn}\nopen({str(done)!r}, 'w').close()"
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}])"
    own = machine._own_ticks()
    subprocess.run([sys.executable, "-c", starts], check=True, start_new_session=True)
    wait_until(done.exists, "the orphan has burnt its second")
    assert machine._own_ticks() - own < 0.9 * os.sysconf("SC_CLK_TCK")
    share = before.share()
    assert share is not None
    assert 0 < share <= 1


@pytest.mark.parametrize(("load", "marked"), [(0.1, False), (3.0, True)])
def test_a_loaded_machine_is_marked(load: float, marked: bool) -> None:
    seen = msgspec.structs.replace(record([row()]), load_after=2.25)
    seen = msgspec.structs.replace(seen, machine=msgspec.structs.replace(seen.machine, load=load, cores=2))
    assert ("**loaded**" in as_page(seen)) is marked
    assert "after it: 2.25" in as_page(seen)


def test_pictures_are_files_beside_the_page_that_shows_them(tmp_path: Path) -> None:
    page = write_record(tmp_path, msgspec.structs.replace(record([row()]), plots={"speed": "<svg/>"}))
    assert "![speed](exchange-speed.svg)" in page.read_text()
    assert (tmp_path / "exchange-speed.svg").read_text() == "<svg/>"


@pytest.mark.parametrize(
    ("scenes", "simulated", "name"),
    [
        ((), False, "cluster"),
        (("equal",), False, "cluster-equal"),
        (("unequal",), True, "cluster-simulated-unequal"),
        (("workers-4", "workers-8"), True, "cluster-simulated-workers"),
    ],
)
def test_other_hosts_are_another_question(scenes: tuple[str, ...], simulated: bool, name: str) -> None:
    assert record_name("cluster", BenchPlan(scenes=scenes, simulated=simulated)) == name


def test_one_name_is_for_one_record() -> None:
    with pytest.raises(ConfigError, match="--as names one record"):
        chosen(["store", "death"], BenchPlan(record="mine"))


def test_a_command_on_record_names_no_folder_of_this_machine() -> None:
    words = ["bench", "cluster", "--data", "/home/somebody/cifar-10", "--results", "kept.jsonl"]
    assert shown_command(words) == "paceline bench cluster --data cifar-10 --results kept.jsonl"
