"""The best of ours against the best of the paper's strategies, cell by cell."""

from __future__ import annotations

from paceline_bench.harness.record import BenchRow
from paceline_bench.strategies.cells import Cell
from paceline_bench.strategies.roster import STRATEGIES
from paceline_bench.strategies.told.scoring import accurate
from paceline_bench.strategies.told.tables import ResultGrid, about, over

TABLE = "Best of ours, among those that lose no more than chance against DDP"


def best_rows(grid: ResultGrid) -> list[BenchRow]:
    """Where both sides have somebody."""
    rows = [_row(grid, cell) for cell in grid.timed() if cell.workers > 1]
    return [row for row in rows if row is not None]


def _row(grid: ResultGrid, cell: Cell) -> BenchRow | None:
    speeds = accurate(grid, cell, 0.0)
    ours = [name for name in speeds if STRATEGIES[name].ours]
    theirs = [name for name in speeds if not STRATEGIES[name].ours]
    if not (ours and theirs):
        return None
    mine, other = (max(names, key=lambda name: speeds[name]) for names in (ours, theirs))
    case = about(cell) | {"best of ours": f"{mine}, {speeds[mine]:,.0f} samples/s"}
    case |= {"best of the others": f"{other}, {speeds[other]:,.0f} samples/s"}
    remark = f"chosen by these very runs, of {len(ours)} of ours and {len(theirs)} others"
    ratio = over(speeds[mine], speeds[other])
    return BenchRow(table=TABLE, case=case, measured={}, figure="ratio", value=ratio, remark=remark)
