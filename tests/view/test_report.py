"""The report is one file that needs nothing else, shows what is known and survives what is odd."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.errors import ConfigError, TraceError
from paceline.trace import TraceWriter
from paceline.trace.events import (
    SCHEMA,
    AnyEvent,
    Decided,
    Evaluated,
    Note,
    Progress,
    RunEnded,
    RunStarted,
    Totals,
    WorkerJoined,
    WorkerLeft,
)
from paceline.view.report.report import write_report
from view.synthetic import SyntheticRun, write_run

HOSTILE = "<script>alert(1)</script>\"'&"


class Outline(HTMLParser):
    """Checks that elements nest, and notes what a browser would see."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def started(run: str = "r", summarised: bool = False) -> RunStarted:
    head = (0.0, SCHEMA, run, "ssp", {"staleness": 3}, 4, 0, True, "2025-01-01T00:00:00")
    return RunStarted(*head, summarised=summarised)


def folder(path: Path, *events: AnyEvent) -> Path:
    path.mkdir()
    writer = TraceWriter(path / "trace.jsonl")
    for event in events:
        writer.write(event)
    writer.close()
    return path


@pytest.fixture(scope="module")
def page(four_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report(four_runs, tmp_path_factory.mktemp("out")).read_text()


def test_report_refers_to_nothing_outside_of_itself(page: str) -> None:
    outline = Outline(page)
    assert not [attrs for _, attrs in outline.tags if {"src", "href", "xlink:href", "srcset"} & attrs.keys()]
    assert not {"link", "iframe", "img", "object", "embed"} & {tag for tag, _ in outline.tags}
    assert "//" not in page
    assert not re.search(r"url\(|@import", page)


def test_report_of_several_runs_holds_every_chart(page: str) -> None:
    outline = Outline(page)
    described = [attrs["aria-label"] or "" for tag, attrs in outline.tags if tag == "svg"]
    assert {"loss over time", "accuracy over time", "samples per second over time"} <= set(described)
    assert sum(text.startswith("timeline of run") for text in described) == 4
    assert sum(text.startswith("staleness of") for text in described) == 4
    assert sum(text.startswith("bytes sent by each worker of") for text in described) == 4
    assert "bytes sent by each run" in described
    for words in (
        "target 90 %",
        "1.00×",
        "emulated: rank 3 slowed 2.5×",
        "rank 3",
        "seconds since the run began",
    ):
        assert words in outline.text
    assert outline.text.count("The whole run.") < 4


def test_report_is_small(page: str) -> None:
    assert len(page) < 400_000


def test_hostile_words_of_a_run_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    run = SyntheticRun("ssp", run=HOSTILE, pushes=40)
    events = list(run.events())
    events[-1:-1] = [Note(9.0, "error", HOSTILE), WorkerLeft(9.0, 1, "failed", HOSTILE)]
    paths = [folder(tmp_path / "a", *events), folder(tmp_path / "b", *events)]
    written = write_report(paths, tmp_path / "report.html").read_text()
    outline = Outline(written)
    assert outline.count("script") == 1
    assert "alert(1)</script>" not in written
    assert outline.text.count(HOSTILE) >= 6


def test_lost_workers_and_notes_are_told_and_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SyntheticRun("ssp", dies=(2, 30), pushes=120, slow={3: 2.5}))
    outline = Outline(write_report([run], tmp_path).read_text())
    assert "rank 2 died: killed by signal 9 (32 samples dispensed again)" in outline.text
    assert "warning: rank 2 is gone" in outline.text
    assert any(attrs.get("class") == "cross" for _, attrs in outline.tags)


def test_summarised_trace_shows_what_it_has_and_says_what_it_lacks(tmp_path: Path) -> None:
    progress = [Progress(float(t), 10 * t, 320 * t, 10 * t, t, t + 3, 1) for t in range(1, 40)]
    totals = Totals(40.0, 400, 12_800, 3, {0: 100, 2: 300}, (10.0,) * 4, (20.0, 20.0, 20.0, 0.0))
    joined = [WorkerJoined(0.0, rank) for rank in range(4)]
    left = [WorkerLeft(40.0, rank, "finished") for rank in range(4)]
    ending = (*left, totals, RunEnded(40.0, "finished"))
    run = folder(tmp_path / "run", started(summarised=True), *joined, *progress, *ending)
    outline = Outline(write_report([run], tmp_path).read_text())
    described = [attrs["aria-label"] or "" for tag, attrs in outline.tags if tag == "svg"]
    assert described == ["staleness of the gradients of ssp", "samples per second over time"]
    assert "The trace is summarised" in outline.text
    assert "No loss was reported" in outline.text
    assert "50 50 50 0 %" in outline.text
    assert "virtual" in outline.text


def test_diverged_loss_is_said_and_not_drawn(tmp_path: Path) -> None:
    losses = [2.0, 1.0, float("nan"), float("inf")]
    evaluated = [Evaluated(float(t), 0, t, t, {"loss": loss}) for t, loss in enumerate(losses, 1)]
    written = write_report([folder(tmp_path / "run", started(), *evaluated)], tmp_path).read_text()
    assert "Diverged, so not all of it can be drawn: ssp." in written
    assert not re.search(r'"[^"]*\bnan\b', written)


def test_evaluations_written_late_are_drawn_in_the_order_of_time(tmp_path: Path) -> None:
    times = [1.0, 5.0, 3.0]
    evaluated = [Evaluated(t, 0, 1, 1, {"accuracy": t / 10}) for t in times]
    written = write_report([folder(tmp_path / "run", started(), *evaluated)], tmp_path).read_text()
    drawn = re.search(r'd="M([^"]*)" class="line"', written)
    assert drawn
    across = [float(point.split(",")[0]) for point in drawn[1].split()]
    assert across == sorted(across)


def test_run_that_only_began_has_dashes_and_no_charts(tmp_path: Path) -> None:
    outline = Outline(write_report([folder(tmp_path / "run", started())], tmp_path).read_text())
    assert outline.count("svg") == 0
    assert outline.text.count("—") >= 7
    assert "[running]" in outline.text


def test_long_run_of_many_workers_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", SyntheticRun("dssp", workers=40, slow={3: 2.5}, pushes=20_000))
    assert write_report([run], tmp_path).stat().st_size < 400_000


@pytest.mark.parametrize("line", [b"not json\n", b'{"event":"nonsense","t":1}\n', b"\xff\xfe\n"])
def test_corrupt_trace_is_a_trace_error(tmp_path: Path, line: bytes) -> None:
    run = folder(tmp_path / "run", started())
    with (run / "trace.jsonl").open("ab") as file:
        file.write(line)
    with pytest.raises(TraceError, match="line 2"):
        write_report([run], tmp_path / "report.html")


def test_impossible_release_is_a_trace_error(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", started(), Decided(9.0, 9, None, 1, release=(3,)))
    with pytest.raises(TraceError, match="rank 3"):
        write_report([run], tmp_path / "report.html")


def test_empty_or_missing_trace_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no event"):
        write_report([folder(tmp_path / "empty")], tmp_path / "report.html")
    with pytest.raises(TraceError, match="no trace"):
        write_report([tmp_path / "missing"], tmp_path / "report.html")


def test_report_of_nothing_is_a_user_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        write_report([], tmp_path / "report.html")
