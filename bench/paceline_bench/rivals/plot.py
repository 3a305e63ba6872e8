"""The comparison with rivals as a picture: time to accuracy, samples/s, bytes, and what a death costs."""

from __future__ import annotations

import re

from paceline_bench.harness.record import BenchRow
from paceline_bench.rivals.bars import Panel, bars

COLUMNS = {
    "time": "seconds to the accuracy",
    "samples/s": "samples per second",
    "slow link, kB a sample": "kB a sample, slow link",
    "stood still or until the end": "seconds lost, worker killed",
    "samples lost": "% of samples lost, worker killed",
}
"""Columns of the table, and what their panels are called."""


def plots_of_peers(rows: list[BenchRow]) -> dict[str, str]:
    """Medians; one bar per side and accuracy."""
    names = [f"{row.case['side']} ({row.case['to']})" if "to" in row.case else _name(row) for row in rows]
    ours = [row.case["kind"] == "ours" for row in rows]
    return {"bars": bars(names, ours, [_panel(title, column, rows) for column, title in COLUMNS.items()])}


def _panel(title: str, column: str, rows: list[BenchRow]) -> Panel:
    cells = [str(row.case.get(column, "did not run")) for row in rows]
    ended = [row.case.get("killed: job finishes") == "no" for row in rows]
    values = [_number(cell) for cell in cells]
    if column.startswith("stood"):  # a job that ended has not lost seconds but itself
        cells = [f"did not finish ({cell})" if no else cell for cell, no in zip(cells, ended, strict=True)]
        values = [None if no else value for value, no in zip(values, ended, strict=True)]
    return Panel(title, values, cells)


def _number(cell: str) -> float | None:
    """The median at the beginning of a cell."""
    found = re.match(r"[\d,]+(\.\d+)?", cell)
    return None if found is None else float(found[0].replace(",", ""))


def _name(row: BenchRow) -> str:
    return str(row.case["side"])
