"""What a benchmark leaves behind: a dated page for people and the same figures as JSON beside it."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Literal

import msgspec

from paceline_bench.harness.machine import Machine
from paceline_bench.harness.stats import Interval, Spread

Value = str | int | float
MOST_OTHERS = 0.1
"""Share of the processors beyond which others disturb what is measured."""


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case that was measured, and whether it meets its target."""

    case: dict[str, Value]
    """What was measured: size, optimizer, workers and the like."""
    measured: dict[str, Spread]
    """Per side; ours is called `paceline`. Seconds."""
    figure: Literal["speedup", "ratio", "overhead", "seconds", "share", "points", "count"]
    """What `value` is: the peer's median over ours, its only measurement over ours, our extra time, our
    time, a part of a whole, points of a hundred ahead, a number."""
    value: float | None
    """None when nothing can be compared, because a side did not get so far."""
    interval: Interval | None = None
    """Of `value`, with 95 % confidence."""
    target: float | None = None
    limit_s: float | None = None
    """The least time that memory and system calls allow, measured in the same run."""
    remark: str = ""
    notes: dict[str, str] = {}
    """What a table has no room for; it stands below."""
    table: str = ""
    """The heading of the table it belongs to, where a benchmark has several."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None or self.value is None:
            return None
        return self.value >= self.target if self.figure in ("speedup", "ratio") else self.value <= self.target

    @property
    def shown(self) -> str:
        """`value` for people."""
        return _figure(self, self.value)

    @property
    def distance(self) -> float | None:
        """How many times longer than the limit we take."""
        return self.measured["paceline"].median / self.limit_s if self.limit_s else None

    @property
    def beyond(self) -> bool:
        """Whether the target could not be met at the limit either."""
        if self.target is None or self.limit_s is None:
            return False
        others = [seen.median for side, seen in self.measured.items() if side != "paceline"]
        if self.figure in ("speedup", "ratio"):
            return bool(others) and others[0] / self.limit_s < self.target
        if self.figure == "overhead":
            return bool(others) and self.limit_s / others[0] - 1 > self.target
        return self.figure == "seconds" and self.limit_s > self.target


class BenchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one benchmark."""

    name: str
    question: str
    """What is measured, from where to where, and what the other side was given."""
    date: str
    command: str
    seed: int
    quick: bool
    machine: Machine
    rows: list[BenchRow]
    load_after: float | None = None
    """Of the machine, when all was measured: the benchmark's own processes are in it."""
    others: float | None = None
    """Share of the machine's processors that others used while it was measured."""
    kept: int = 0
    """How many results came from earlier commands (`--results`), of whose load nothing is known here."""
    plots: dict[str, str] = {}
    """Pictures by name, as SVG: files beside the page."""


def write_record(folder: Path, record: BenchRecord) -> Path:
    """Write page and JSON under a name that is not taken; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{record.date}-{record.name}", 1
    while (folder / f"{stem}.md").exists():
        number += 1
        stem = f"{record.date}-{record.name}-{number}"
    (folder / f"{stem}.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    for name, picture in record.plots.items():
        (folder / f"{stem}-{name}.svg").write_text(picture)
    page = folder / f"{stem}.md"
    page.write_text(as_page(record, stem))
    return page


def as_page(record: BenchRecord, stem: str = "") -> str:
    """The record as Markdown; its pictures are files whose names begin with `stem`."""
    machine = record.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    lines = [f"# {record.name}, {record.date}", "", record.question, ""]
    lines += [f"- command: `{record.command}`" + (" (quick: a smoke test)" if record.quick else "")]
    lines += [
        f"- hardware: {machine.cpu}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}"
    ]
    lines += [_load(record)]
    lines += [f"- versions: {versions}", f"- seed: {record.seed}", f"- memory: {_bandwidth(machine)}", ""]
    lines += [line for name in record.plots for line in (f"![{name}]({stem}-{name}.svg)", "")]
    return "\n".join([*lines, *as_tables(record.rows), ""])


def as_tables(rows: list[BenchRow]) -> list[str]:
    """One table under each heading, in order, with its notes; without headings just one."""
    lines: list[str] = []
    for title in dict.fromkeys(row.table for row in rows):
        under = [row for row in rows if row.table == title]
        lines += [*([f"## {title}", ""] if title else []), *as_table(under), *_notes(under), ""]
    return lines[:-1]


def as_table(rows: list[BenchRow]) -> list[str]:
    """The rows as a Markdown table, one column per side; columns in which nothing stands are left out."""
    cases = list(dict.fromkeys(key for row in rows for key in row.case))
    sides = list(dict.fromkeys(side for row in rows for side in row.measured))
    head = [*cases, *(f"{side}: median (p10-p90, max)" for side in sides), "figure", "95 %", "target", "met"]
    head += ["limit", "times the limit", "remark"]
    cells = [_cells(row, cases, sides) for row in rows]
    used = [index for index in range(len(head)) if any(line[index] for line in cells)]
    lines = [[line[index] for index in used] for line in (head, ["---"] * len(head), *cells)]
    return [_line(line) for line in lines]


def today() -> str:
    """The date records are filed under."""
    return date.today().isoformat()


def _notes(rows: list[BenchRow]) -> list[str]:
    return [
        line for row in rows if row.notes for line in ("", *(f"- {k}: {v}" for k, v in row.notes.items()))
    ]


def _cells(row: BenchRow, cases: list[str], sides: list[str]) -> list[str]:
    cells = [str(row.case.get(key, "")) for key in cases]
    cells += [_spread(row.measured.get(side)) for side in sides]
    cells += [_figure(row, row.value), _interval(row), _target(row), _met(row)]
    cells += [_seconds(row.limit_s) if row.limit_s else "", f"{row.distance:.1f}" if row.distance else ""]
    return [*cells, row.remark]


def _figure(row: BenchRow, value: float | None) -> str:
    if value is None:
        return ""
    match row.figure:
        case "speedup":
            return f"{value:.1f}x"
        case "ratio":
            return f"{value:.2f}x"
        case "seconds":
            return _seconds(value)
        case "overhead":
            return f"{100 * value:+.2f} %"
        case "share":
            return f"{100 * value:.3f} %"
        case "points":
            return f"{value:+.2f}"
        case "count":
            return f"{value:g}"


def _interval(row: BenchRow) -> str:
    if row.interval is None:
        return ""
    return f"{_figure(row, row.interval.low)} to {_figure(row, row.interval.high)}"


def _target(row: BenchRow) -> str:
    if row.target is None:
        return ""
    return f"{'>=' if row.figure in ('speedup', 'ratio') else '<='} {_figure(row, row.target)}"


def _met(row: BenchRow) -> str:
    if row.met is False and row.beyond:
        return "no: beyond the limit"
    return {True: "yes", False: "no", None: ""}[row.met]


def _spread(seen: Spread | None) -> str:
    if seen is None:
        return ""
    return f"{_seconds(seen.median)} ({_seconds(seen.p10)}-{_seconds(seen.p90)}, {_seconds(seen.largest)})"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{1e6 * value:.1f} us"
    return f"{1e3 * value:.2f} ms" if value < 1 else f"{value:.2f} s"


def _load(record: BenchRecord) -> str:
    before, others = record.machine.load, record.others
    said = f"- load of the machine before the run: {before:.2f}"
    said += "" if record.load_after is None else f", after it: {record.load_after:.2f}"
    said += "" if others is None else f"; others used {100 * others:.0f} % of its processors meanwhile"
    if before > record.machine.cores / 4 if others is None else others > MOST_OTHERS:
        said += " (**loaded**: others were at work, times are not to be trusted)"
    if record.kept:
        said += f"; {record.kept} results are of earlier commands, and this says nothing of their load"
    return said


def _bandwidth(machine: Machine) -> str:
    return ", ".join(f"{size}: copies at {rate / 1e9:.1f} GB/s" for size, rate in machine.bandwidth.items())


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
