"""The six findings that the evaluation states, each in or out of its published range, with our figure."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import msgspec

from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.strategies.cells import Cell
from paceline_bench.strategies.outcome import CHANCE
from paceline_bench.strategies.told.tables import T1, ResultGrid, over, points

TABLE = "Findings of the evaluation"
NO_GAIN = 0.05
"""A gain in samples per second that counts as none, as rule 5 of the advice has it."""


class SourcedFigure(NamedTuple):
    """A figure, and where it comes from."""

    value: float
    told: str


class PublishedFinding(NamedTuple):
    """What was published, and what we compare with it."""

    what: str
    published: str
    figure: Callable[[ResultGrid], SourcedFigure | None]
    holds: Callable[[float], bool]


def findings(grid: ResultGrid) -> list[BenchRow]:
    """One row each."""
    return [_row(each, each.figure(grid)) for each in FINDINGS]


def _row(each: PublishedFinding, seen: SourcedFigure | None) -> BenchRow:
    case: dict[str, Value] = {"finding": each.what, "published": each.published}
    if seen is None:
        case |= {"ours": "", "published range": "not measured"}
    else:
        case |= {"ours": seen.told, "published range": "in" if each.holds(seen.value) else "out"}
        case["compared"] = round(seen.value, 4)
    return BenchRow(table=TABLE, case=case, measured={}, figure="ratio", value=None)


def ratios(grid: ResultGrid, above: str, below: str, cells: list[Cell]) -> dict[str, float]:
    """Of samples per second, by cell."""
    both = {cell.name: over(grid.speed(cell, above), grid.speed(cell, below)) for cell in cells}
    return {name: ratio for name, ratio in both.items() if ratio is not None}


def _level(grid: ResultGrid) -> list[Cell]:
    """Cells with the most workers, equal ones, on this machine."""
    level = [c for c in grid.timed() if (c.link, c.straggler, c.kind) == ("native", "none", "emulated")]
    most = max((cell.workers for cell in level), default=0)
    return [cell for cell in level if cell.workers == most > 1]


def _shared(grid: ResultGrid) -> list[Cell]:
    return [cell for cell in grid.timed() if cell.workers > 1]


def _middle(seen: dict[str, float], unit: str) -> SourcedFigure | None:
    if not seen:
        return None
    low, high, middle = min(seen.values()), max(seen.values()), median(seen.values())
    where = f"{low:.2f} to {high:.2f} in {len(seen)} cells" if len(seen) > 1 else next(iter(seen))
    return SourcedFigure(middle, f"{middle:.2f}{unit} ({where})")


def speed_up(grid: ResultGrid) -> SourcedFigure | None:
    """Of DDP over one worker."""
    return _middle(ratios(grid, "ddp", "single", _level(grid)), "x")


def memory(grid: ResultGrid) -> SourcedFigure | None:
    """FSDP's peak over DDP's, where there are most workers."""
    cells = [cell for cell in grid.cells if cell.kind == "memory"]
    most = max((cell.workers for cell in cells), default=0)
    seen = {}
    for cell in cells:
        fsdp, ddp = grid.get(cell, "fsdp"), grid.get(cell, "ddp")
        if cell.workers == most and fsdp is not None and ddp is not None:
            seen[cell.name] = max(fsdp.figures[0].peak_bytes) / max(ddp.figures[0].peak_bytes)
    return _middle(seen, " of DDP's")


def slow_down(grid: ResultGrid) -> SourcedFigure | None:
    """FSDP's time over DDP's, at worst."""
    seen = ratios(grid, "ddp", "fsdp", _shared(grid))
    worst = max(seen, key=lambda name: seen[name], default=None)
    if worst is None:
        return None
    return SourcedFigure(
        seen[worst], f"at most {seen[worst]:.2f}x ({worst}), median {median(seen.values()):.2f}x"
    )


def time_saved(grid: ResultGrid) -> SourcedFigure | None:
    """By the asynchronous server, against both synchronous ways, at best."""
    sync, ddp = (ratios(grid, "ps-async", base, _shared(grid)) for base in ("ps-sync", "ddp"))
    if not sync:
        return None
    best = max(sync, key=lambda name: sync[name])
    saved = 1 - 1 / sync[best]
    beside = f"; against ddp's {100 * (1 / max(ddp.values()) - 1):+.0f} %" if ddp else ""
    return SourcedFigure(saved, f"at best {-100 * saved:+.0f} % against ps-sync's time ({best}){beside}")


def accuracy_lost(grid: ResultGrid) -> SourcedFigure | None:
    """By the asynchronous server, for either weight of a push. What counts is 1/N: with 1 a step is N times
    as large, which alone may be what loses accuracy."""
    mean, whole = (_middle(_lost(grid, name), " points") for name in ("ps-async", "ps-async-sum"))
    if mean is None:
        return None
    beside = "" if whole is None else f"; weight 1: {whole.told}, with a step N times as large"
    return SourcedFigure(mean.value, f"weight 1/N: {mean.told}{beside}{_diverged(grid)}")


def _lost(grid: ResultGrid, name: str) -> dict[str, float]:
    """Points that a strategy loses against `ps-sync`, by cell; the median of its seeds counts."""
    pairs = {cell.name: points(grid.get(cell, "ps-sync"), grid.tried(cell, name)) for cell in _shared(grid)}
    return {name: lost for name, lost in pairs.items() if lost is not None}


def _diverged(grid: ResultGrid) -> str:
    names = ("ps-async", "ps-async-sum")
    seen = [each for cell in _shared(grid) for name in names if (each := grid.tried(cell, name)) is not None]
    diverged = sum(each.diverged for each in seen)
    if not diverged:
        return ""
    runs = diverged + sum(len(each.figures) for each in seen)
    return f"; {diverged} of {runs} runs diverged and count as {100 * CHANCE:.0f} % accuracy"


def modified_gain(grid: ResultGrid) -> SourcedFigure | None:
    """Of the modified server over the synchronous one, in the cell where it is furthest from none."""
    seen = ratios(grid, "ps-async-mod", "ps-sync", _shared(grid))
    return _furthest({name: ratio - 1 for name, ratio in seen.items()})


def _furthest(gains: dict[str, float]) -> SourcedFigure | None:
    """Where no gain was published, it has to be none in every cell: the one furthest from it counts."""
    if not gains:
        return None
    far = max(gains, key=lambda name: abs(gains[name]))
    others = [gain for name, gain in gains.items() if name != far]
    beside = f"; {min(others):+.2f} to {max(others):+.2f} in {len(others)} others" if others else ""
    return SourcedFigure(gains[far], f"{gains[far]:+.2f} of ps-sync's samples/s in {far}{beside}")


def findings_of(rows: list[BenchRow]) -> list[BenchRow]:
    """Those of a record. That of the modified server is judged again, by the speeds in the record's table: an
    older record holds the median of all cells."""
    speeds = {
        (_cell(row), str(row.case["strategy"])): row.value
        for row in rows
        if row.table == T1 and row.value is not None
    }
    cells = [cell for cell, strategy in speeds if strategy == "ps-async-mod" and (cell, "ps-sync") in speeds]
    again = _furthest({cell: speeds[cell, "ps-async-mod"] / speeds[cell, "ps-sync"] - 1 for cell in cells})
    found = [row for row in rows if row.table == TABLE]
    if again is None:
        return found
    return [_row(MODIFIED, again) if row.case["finding"] == MODIFIED.what else row for row in found]


def _cell(row: BenchRow) -> str:
    case = {"kind" if key == "device" else key: value for key, value in row.case.items()}
    return msgspec.convert({field: case[field] for field in Cell.__struct_fields__}, Cell).name


MODIFIED = PublishedFinding("f: gain of ps-async-mod", "none", modified_gain, lambda x: abs(x) <= NO_GAIN)
FINDINGS = (
    PublishedFinding("a: DDP's speed-up", "2 to 3x", speed_up, lambda x: 2 <= x <= 3),
    PublishedFinding(
        "b: FSDP's peak memory",
        "1/6 to 1/4 of DDP's (v2), below 0.4 (v1)",
        memory,
        lambda x: 1 / 6 <= x <= 1 / 4,
    ),
    PublishedFinding("c: FSDP's time", "up to 6x DDP's", slow_down, lambda x: 1 < x <= 6),
    PublishedFinding("d: time saved by ps-async", "up to 28 %", time_saved, lambda x: 0 < x <= 0.28),
    PublishedFinding("e: accuracy lost by ps-async", "4 to 17 points", accuracy_lost, lambda x: 4 <= x <= 17),
    MODIFIED,
)
