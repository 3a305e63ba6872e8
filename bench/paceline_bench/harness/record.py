"""What a benchmark leaves behind: a page for people and the same figures as JSON, one of each per question.

A new record replaces the older one of its name. Where a benchmark can be run in parts, what a new run has not
tried stays in the record, with the command and the machine of the run that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Literal

import msgspec

from paceline_bench.harness.machine import Machine
from paceline_bench.harness.stats import Interval, Spread

Value = str | int | float
Draw = Callable[["list[BenchRow]"], dict[str, str]]
"""Makes pictures of rows, as SVG, by name."""
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
    tried: bool = True
    """False: it only says why there is no figure, and replaces none."""

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


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """When, how and where something was measured."""

    date: str
    command: str
    seed: int
    machine: Machine
    load_after: float | None = None
    """Of the machine, when all was measured: the benchmark's own processes are in it."""
    others: float | None = None
    """Share of the machine's processors that others used while it was measured."""
    kept: int = 0
    """How many results came from earlier commands (`--results`), of whose load nothing is known here."""


class EarlierRun(BenchRun, frozen=True, kw_only=True):
    """A run of which a record still shows parts that no later run has tried."""

    parts: list[str]


class BenchRecord(BenchRun, frozen=True, kw_only=True):
    """What is known of one question: one run of a benchmark, and what is left of earlier ones."""

    name: str
    question: str
    """What is measured, from where to where, and what the other side was given."""
    quick: bool
    rows: list[BenchRow]
    plots: dict[str, str] = {}
    """Pictures by name, as SVG: files beside the page."""
    part: str = ""
    """Which cell of a case names the part that a later run replaces; empty: it replaces all of them."""
    earlier: list[EarlierRun] = []

    def parts(self) -> dict[str, list[BenchRow]]:
        """The rows of every part."""
        found: dict[str, list[BenchRow]] = {}
        for row in self.rows:
            found.setdefault(str(row.case[self.part]), []).append(row)
        return found

    def run_of(self, part: str) -> BenchRun:
        """Where a part comes from."""
        return next((run for run in self.earlier if part in run.parts), self)


def read_record(path: Path) -> BenchRecord:
    """The record in a file."""
    return msgspec.json.decode(path.read_bytes(), type=BenchRecord)


def write_record(folder: Path, record: BenchRecord, draw: Draw | None = None) -> Path:
    """Write page, JSON and pictures under the record's name, in the place of an older one; returns the page's
    path. Parts of the older one that were not tried again stay; then pictures are drawn anew."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{record.name}.json"
    if kept.exists():
        older = read_record(kept)
        record = merged(older, record)
        if record.earlier and draw is not None:
            record = msgspec.structs.replace(record, plots=draw(record.rows))
        for name in older.plots:
            (folder / f"{record.name}-{name}.svg").unlink(missing_ok=True)
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    for name, picture in record.plots.items():
        (folder / f"{record.name}-{name}.svg").write_text(picture)
    page = folder / f"{record.name}.md"
    page.write_text(as_page(record))
    return page


def merged(older: BenchRecord, newer: BenchRecord) -> BenchRecord:
    """The newer record, with the parts of the older one that it has not tried, each in its place."""
    if not newer.part or older.part != newer.part:
        return newer
    before, now = older.parts(), newer.parts()
    left = [
        part for part, rows in before.items() if part not in now or (_tried(rows) and not _tried(now[part]))
    ]
    together = {part: before[part] if part in left else now[part] for part in [*before, *now]}
    runs: list[EarlierRun] = []
    for run in [*older.earlier, older]:
        parts = [part for part in left if older.run_of(part) is run]
        runs += [_as_earlier(run, parts)] if parts else []
    rows = [row for part in together.values() for row in part]
    return msgspec.structs.replace(newer, rows=rows, earlier=runs)


def _tried(rows: list[BenchRow]) -> bool:
    return any(row.tried for row in rows)


def _as_earlier(run: BenchRun, parts: list[str]) -> EarlierRun:
    about = {name: getattr(run, name) for name in BenchRun.__struct_fields__}
    return EarlierRun(**about, parts=parts)


def as_page(record: BenchRecord) -> str:
    """The record as Markdown; its pictures are files whose names begin with the record's."""
    lines = [f"# {record.name}, {record.date}", "", record.question, ""]
    lines += _about(record, " (quick: a smoke test)" if record.quick else "")
    for run in record.earlier:
        lines += ["", f"Not tried again since {run.date}: {', '.join(run.parts)}.", "", *_about(run)]
    lines += ["", *(line for name in record.plots for line in (f"![{name}]({record.name}-{name}.svg)", ""))]
    return "\n".join([*lines, *as_tables(record.rows), ""])


def _about(run: BenchRun, remark: str = "") -> list[str]:
    machine = run.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return [
        f"- command: `{run.command}`{remark}",
        f"- hardware: {machine.cpu}, {machine.cores} cores, {machine.memory_gb:.0f} GB, {machine.system}",
        _load(run),
        f"- versions: {versions}",
        f"- seed: {run.seed}",
        f"- memory: {_bandwidth(machine)}",
    ]


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
    """The date that a record bears."""
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


def _load(record: BenchRun) -> str:
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
