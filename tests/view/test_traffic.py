"""The charts of bytes: a bar per worker, a bar per run, and words where nothing is known."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from paceline.trace import TraceWriter
from paceline.trace.events import SCHEMA, Exchanged, ModelReady, Progress, RunEnded, RunStarted, Totals
from paceline.view.report.report import write_report


def run(path: Path, protocol: str, *sent: tuple[int, int], workers: int = 3, **more: Any) -> Path:
    """A run of peers in which ranks have sent so many bytes."""
    path.mkdir()
    writer = TraceWriter(path / "trace.jsonl")
    start = (0.0, SCHEMA, path.name, protocol, {}, workers, 0, False, "")
    writer.write(RunStarted(*start, **{"family": "peer"} | more))
    for rank, size in sent:
        writer.write(Exchanged(1.0, "average", (rank,), size))
    if more.get("summarised"):
        writer.write(ModelReady(0.0, 10, 40, 40))
        writer.write(Progress(1.0, 5, 5, 5, 0, 0, 0))
        writer.write(Totals(1.0, 5, 5, 0, {0: 5}, (1.0,) * workers, (0.0,) * workers))
    writer.write(RunEnded(2.0, "finished"))
    writer.close()
    return path


def page(tmp_path: Path, *runs: Path) -> str:
    whole = write_report(list(runs), tmp_path / "report.html").read_text()
    return whole[whole.index("<h2>Bytes sent</h2>") : whole.index("<h2>Failures and notes</h2>")]


def heights(text: str) -> list[float]:
    return [float(found) for found in re.findall(r'<rect[^>]* height="([\d.]+)"', text)]


def test_every_worker_has_a_bar_as_high_as_what_it_sent(tmp_path: Path) -> None:
    text = page(tmp_path, run(tmp_path / "r", "allreduce", (0, 1000), (1, 500), (1, 500), (2, 2_000_000)))
    for words in ("rank 0: 1 kB sent", "rank 1: 1 kB sent", "rank 2: 2 MB sent", "bytes sent per worker"):
        assert words in text
    first, second, third = heights(text)
    assert first == second < third / 100
    assert "bytes sent by each run" not in text


def test_every_run_has_a_bar_as_long_as_what_all_its_workers_sent(tmp_path: Path) -> None:
    one = run(tmp_path / "a", "allreduce", (0, 3000), (1, 1000))
    other = run(tmp_path / "b", "allreduce", (0, 750), (1, 250), compress="int8")
    text = page(tmp_path, one, other)
    assert "allreduce: 4 kB sent" in text
    assert "allreduce + int8: 1 kB sent" in text
    rows = text[: text.index('class="many"')]
    long, short = (float(found) for found in re.findall(r'<rect[^>]* width="([\d.]+)"', rows))
    assert short == round(long / 4, 1) or abs(short - long / 4) < 0.2


def test_many_workers_share_bars(tmp_path: Path) -> None:
    sent = [(rank, 100 if rank < 500 else 300) for rank in range(1000)]
    text = page(tmp_path, run(tmp_path / "r", "allreduce", *sent, workers=1000))
    assert len(heights(text)) <= 33
    assert "ranks 0 to 31, on average: 100 B sent" in text
    assert "ranks 992 to 999, on average: 300 B sent" in text


def test_nothing_sent_is_a_zero_and_nothing_known_is_said(tmp_path: Path) -> None:
    silent = page(tmp_path, run(tmp_path / "a", "local_sgd", workers=2))
    assert silent.count(": 0 B sent") == 2
    unknown = page(tmp_path, run(tmp_path / "b", "bsp", family="paced"))
    assert "traffic is unknown" in unknown
    summed = page(tmp_path, run(tmp_path / "c", "bsp", family="paced", summarised=True))
    assert "The trace is summarised: it has no figures of single workers." in summed
