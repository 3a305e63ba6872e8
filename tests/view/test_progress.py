"""The live view follows the events: who does what, how far the run is."""

from __future__ import annotations

import io
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from paceline.trace import TraceWriter
from paceline.trace.events import (
    SCHEMA,
    AnyEvent,
    Decided,
    ModelReady,
    Note,
    Planned,
    Progress,
    RunEnded,
    RunStarted,
    WorkerJoined,
    WorkerLeft,
)
from paceline.view.terminal.beside import watch
from paceline.view.terminal.progress import STARTING, RunProgress, live
from view.synthetic import SyntheticRun

START = RunStarted(0.0, SCHEMA, "a1", "ssp", {"staleness": 3}, 3, 0, False, "2025-01-01T00:00:00")


class Screen:
    """A progress view on a pretended terminal, with a clock set by hand."""

    def __init__(self, total: int | None = None, width: int = 80, terminal: bool = False) -> None:
        self.now = 0.0
        self.out = io.StringIO()
        self.console = Console(file=self.out, width=width, height=40, force_terminal=terminal)
        self.progress = RunProgress(total, self.console, lambda: self.now)

    def feed(self, *events: AnyEvent) -> Screen:
        for event in events:
            self.now = max(self.now, event.t)
            self.progress.add(event)
        return self

    def text(self) -> str:
        plain = Console(file=io.StringIO(), width=self.console.width)
        with plain.capture() as shown:
            plain.print(self.progress)
        return shown.get()

    def row(self, rank: int) -> list[str]:
        rows = [line.split() for line in self.text().splitlines()]
        return next(row for row in rows if row and row[0] == str(rank))


def pushed(t: float, worker: int, clock: int, release: tuple[int, ...] = (), **more: Any) -> Decided:
    return Decided(t, 0, worker, clock, clock=clock, release=release, samples=10, **more)


def test_told_beside_a_run_lines_stand_where_others_may_write_and_the_last_says_how_far_it_came(
    tmp_path: Path,
) -> None:
    screen = Screen(terminal=True)
    writer = TraceWriter(tmp_path / "trace.jsonl")
    told = [START, WorkerJoined(0.0, 0), pushed(1.0, 0, 1), Note(2.0, "warning", "take care")]
    for event in told:
        writer.write(event)
    writer.close()
    watch(tmp_path, lambda within_s: True, screen.console, patience_s=0.0)
    note, last = (Text.from_ansi(line).plain for line in screen.out.getvalue().splitlines())
    assert note == "warning: take care"
    assert last.startswith("rank 0 is done: 0:02 · 10 samples")
    assert "\x1b[1A" not in screen.out.getvalue(), "nothing is drawn over"


@pytest.mark.timeout(30)
def test_told_beside_a_run_the_last_line_waits_for_what_the_store_has_not_yet_written(tmp_path: Path) -> None:
    screen = Screen()
    writer = TraceWriter(tmp_path / "trace.jsonl")

    def write(*events: AnyEvent) -> None:
        for event in events:
            writer.write(event)
        writer.flush()

    write(START, WorkerJoined(0.0, 0))
    rest = pushed(1.0, 0, 1), WorkerLeft(2.0, 0, "finished"), RunEnded(3.0, "finished", samples_due=20)
    later = Timer(0.3, write, rest)
    later.start()
    watch(tmp_path, lambda within_s: True, screen.console, patience_s=1e9)
    later.join()
    writer.close()
    assert "rank 0 is done: 0:0" in screen.out.getvalue()
    assert "10 of 20" in screen.out.getvalue(), "the summary of the run"


def test_told_beside_a_run_that_is_no_terminal_there_are_warnings_and_a_summary_alone(tmp_path: Path) -> None:
    screen = Screen()
    writer = TraceWriter(tmp_path / "trace.jsonl")
    notes = Note(2.0, "info", "by the way"), Note(2.0, "warning", "take care")
    for event in (START, WorkerJoined(0.0, 0), pushed(1.0, 0, 1), *notes, RunEnded(3.0, "finished")):
        writer.write(event)
    writer.close()
    watch(tmp_path, lambda within_s: True, screen.console, patience_s=0.0, quiet=True)
    first, second, *_ = screen.out.getvalue().splitlines()
    assert first == "warning: take care"
    assert "finished after" in second


def test_beside_a_run_without_a_trace_nothing_is_told(tmp_path: Path) -> None:
    screen = Screen()
    watch(tmp_path, lambda within_s: True, screen.console, patience_s=0.0)
    assert not screen.out.getvalue()


def three_workers() -> Screen:
    return Screen().feed(START, *(WorkerJoined(0.0, rank) for rank in range(3)))


def test_worker_computes_until_it_pushes_and_waits_until_it_is_released() -> None:
    screen = three_workers()
    assert screen.row(0)[1] == "computing"
    assert screen.feed(pushed(1.0, 0, 1)).row(0)[1] == "waiting"
    assert screen.feed(Decided(2.0, 0, None, 1, release=(0,))).row(0)[1] == "computing"


@pytest.mark.parametrize(
    ("reason", "state"),
    [("died", "died"), ("failed", "failed"), ("away", "away"), ("finished", "left"), ("stopped", "left")],
)
def test_worker_that_is_gone_is_shown_as_gone(reason: Any, state: str) -> None:
    screen = three_workers().feed(WorkerLeft(1.0, 2, reason))
    assert screen.row(2)[1] == state


def test_lead_is_counted_from_the_slowest_who_takes_part() -> None:
    screen = three_workers().feed(pushed(1.0, 0, 1, (0,)), pushed(2.0, 0, 2, (0,), staleness=4))
    screen.feed(pushed(2.5, 1, 1, (1,)))
    assert screen.row(0)[2] == "2"
    assert screen.row(0)[6] == "2"
    screen.feed(WorkerLeft(3.0, 2, "died"))
    assert screen.row(0)[6] == "1"
    assert screen.row(0)[3] == "4"
    assert "—" in screen.row(2)


def test_newcomer_starts_level_with_the_slowest() -> None:
    screen = Screen().feed(START, WorkerJoined(0.0, 0), pushed(1.0, 0, 1, (0,)), WorkerJoined(1.5, 1))
    assert screen.progress.workers.leads() == {0: 0, 1: 0}


def test_bar_and_time_left_follow_the_samples() -> None:
    screen = Screen(total=100).feed(START, WorkerJoined(0.0, 0))
    for second in range(1, 6):
        screen.feed(pushed(float(second), 0, second, (0,)))
    assert "50 % of 100" in screen.text()
    assert "0:05 · 0:05 left" in screen.text()


def test_elapsed_time_goes_on_between_events() -> None:
    screen = three_workers()
    screen.now = 65.0
    assert "1:05" in screen.text()


def test_without_a_total_the_epoch_is_shown() -> None:
    run = list(SyntheticRun("bsp", pushes=150).events())
    assert "epoch 2 · 4,800 samples" in Screen().feed(*run).text()


def test_total_is_what_the_run_plans_unless_it_was_given() -> None:
    model = ModelReady(0.0, 1, 4, 4, samples_per_epoch=50)
    planned = Screen().feed(START, model, Planned(0.0, 2), WorkerJoined(0.0, 0), pushed(1.0, 0, 1, (0,)))
    assert "10 % of 100" in planned.text()
    resumed = Screen().feed(START, model, Planned(0.0, 2, before=30))
    assert resumed.progress.total_samples == 70, "what the run that is resumed has done is not done again"
    assert Screen(total=7).feed(START, model, Planned(0.0, 2)).progress.total_samples == 7


def test_many_workers_are_summed_up_and_only_the_slowest_listed() -> None:
    run = SyntheticRun("ssp", workers=40, slow={7: 3.0}, pushes=600)
    events = [event for event in run.events() if not isinstance(event, WorkerLeft)]
    screen = Screen().feed(*events[:-10])
    shown = screen.text()
    assert "40 workers:" in shown
    assert len(shown.splitlines()) < 20
    assert screen.row(7)[1] == "computing"
    first = next(line for line in shown.splitlines() if "%" in line)
    assert first.split()[0] == "7"


def test_summarised_run_shows_what_it_tells() -> None:
    screen = Screen(total=1000).feed(START, Progress(2.0, 40, 400, 40, 93, 101, 12))
    assert "12 waiting · iterations 93 to 101" in screen.text()
    assert "40 % of 1,000" in screen.text()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("workers", [4, 16, 40])
def test_view_fits_the_terminal(width: int, workers: int) -> None:
    screen = Screen(12_800, width)
    run = SyntheticRun("dssp", workers=workers, slow={3: 2.5}, dies=(2, 50), pushes=300, run="r" * 40)
    for event in run.events():
        screen.feed(event)
    lines = screen.text().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24


def test_without_a_terminal_a_plain_line_comes_every_five_seconds() -> None:
    screen = Screen(total=400)
    with live(screen.progress):
        screen.feed(START, WorkerJoined(0.0, 0))
        for tenth in range(1, 121):
            screen.feed(pushed(tenth / 10, 0, tenth, (0,)))
    lines = screen.out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("0:05 · ")
    assert "\x1b" not in screen.out.getvalue()


def test_notes_and_lost_workers_are_printed_above_the_view() -> None:
    screen = Screen()
    with live(screen.progress) as progress:
        screen.feed(
            START, Note(1.0, "warning", "[odd] note"), WorkerLeft(2.0, 1, "died", "killed by signal 9")
        )
        progress.print("worker says: " + "x" * 200)
    lines = screen.out.getvalue().splitlines()
    assert lines[:2] == ["warning: [odd] note", "rank 1 died: killed by signal 9"]
    assert lines[2] == "worker says: " + "x" * 200


def test_on_a_terminal_the_view_is_drawn_and_lines_go_above_it() -> None:
    screen = Screen(terminal=True)
    with live(screen.progress) as progress:
        screen.feed(START, WorkerJoined(0.0, 0))
        progress.print("hello")
    shown = screen.out.getvalue()
    assert "hello" in shown
    assert "computing" in shown


def test_standard_output_is_left_to_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with live(Screen(terminal=True).progress):
        print('{"json": true}')
    assert capsys.readouterr().out == '{"json": true}\n'


def test_a_line_tells_what_is_known_and_nothing_else() -> None:
    assert Screen().progress.line() == STARTING
    assert Screen().feed(START).progress.line() == STARTING
    begun = Screen().feed(START, WorkerJoined(0.0, 0))
    assert begun.progress.line() == "0:00 · 0 samples · 1 computing"
