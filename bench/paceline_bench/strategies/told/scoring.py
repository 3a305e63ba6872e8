"""Scores `paceline advise strategy`: what it would choose in every cell, against what was best there.

The best is the fastest of those that lose no more accuracy against DDP than may be lost (and what is chance),
and that fit where memory is short: every worker, and on the first host the server as well. A choice is right
if it is within 5 % of that. Strategies that make the same steps, but for rounding, lose nothing by
themselves: how far their accuracies lie apart in a cell is chance.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paceline.plan.strategy import Constraints, StrategyAdvice, advise
from paceline.plan.strategy.advice import FULL
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.strategies.cells import Cell
from paceline_bench.strategies.outcome import MeasuredStrategy
from paceline_bench.strategies.told.tables import ResultGrid, about, points

TABLE = "Advice against what was measured"
MARGIN = 1.0
"""Points of accuracy that are chance in any case."""
SAME_STEPS = ("ddp", "fsdp", "ps-sync", "allreduce", "bsp+store_hosts", "bsp+balance")
"""Strategies whose every step is made with the mean gradient of the same global batch."""
NEAR = 0.05
WISHES = (0.0, 5.0)
"""Points of accuracy that may be lost."""


class AdviceCase(NamedTuple):
    """A question to the advice."""

    cell: Cell
    wish: str
    advice: StrategyAdvice
    fit: dict[str, float]
    """Samples per second of all that would do."""
    every: dict[str, float]
    """Of all that ran."""

    @property
    def choice(self) -> str | None:
        """The strategy that the advice's command runs; torch's DDP stands in for ours if that did not run."""
        named = strategy_of(self.advice.command)
        return "ddp" if self.advice.choice == "ddp" and named not in self.every else named

    @property
    def best(self) -> str:
        """The fastest that would do."""
        return max(self.fit, key=lambda name: self.fit[name])

    @property
    def right(self) -> bool:
        """Whether the advice was good."""
        return self.choice in self.fit and self.loses <= NEAR

    @property
    def loses(self) -> float:
        """Of the best one's samples per second; all of it, if the choice would not do or did not run."""
        if self.choice not in self.fit:
            return 1.0
        return 1 - self.fit[self.choice] / self.fit[self.best]


def strategy_of(command: str) -> str | None:
    """What a command of the advice runs."""
    if "plan osdp" in command:
        return "fsdp"
    if command.startswith("torchrun"):
        return "ddp"
    found = re.search(r"--protocol (\S+)(?: --(balance|store-hosts))?", command)
    return "+".join(filter(None, found.groups())).replace("-", "_") if found else None


def cases(grid: ResultGrid) -> list[AdviceCase]:
    """Two wishes in every timed cell, and a shortage of memory where it was measured."""
    timed = [_timed(grid, cell, wish) for cell in grid.timed() if cell.workers > 1 for wish in WISHES]
    short = [_short(grid, cell) for cell in grid.cells if cell.kind == "memory"]
    return [case for case in (*timed, *short) if case is not None and case.fit]


def advice_rows(grid: ResultGrid) -> list[BenchRow]:
    """One row per question, then the score."""
    asked = cases(grid)
    if not asked:
        return []
    right = sum(case.right for case in asked)
    wrong = [case for case in asked if not case.right]
    lost = [case.loses for case in wrong if case.choice in case.fit]
    loses = (
        f"; where wrong it loses {100 * sum(lost) / len(lost):.0f} % of the speed on the mean" if lost else ""
    )
    unfit = sum(case.choice in case.every and case.choice not in case.fit for case in wrong)
    missing = sum(case.choice not in case.every for case in wrong)
    unfit_told = f"; unfit, by accuracy or memory: {unfit}" if unfit else ""
    missed = f"; not run: {missing}" if missing else ""
    told = f"{right} of {len(asked)} right{loses}{unfit_told}{missed}"
    total = BenchRow(
        table=TABLE, case={"model": "all"}, measured={}, figure="share", value=right / len(asked), remark=told
    )
    return [*map(_row, asked), total]


def _row(case: AdviceCase) -> BenchRow:
    told: dict[str, Value] = about(case.cell) | {"wish": case.wish, "advice": case.advice.choice}
    told |= {"runs": case.choice or "", "rule": case.advice.rule, "best": case.best}
    told["right"] = "yes" if case.right else "no"
    chosen = case.every.get(case.choice or "")
    told["advice's samples/s"] = "" if chosen is None else f"{chosen:,.0f}"
    told["best's samples/s"] = f"{case.fit[case.best]:,.0f}"
    why = "" if case.choice in case.fit else "the choice would not do, or was not run"
    value = None if case.choice not in case.fit else case.loses
    return BenchRow(table=TABLE, case=told, measured={}, figure="share", value=value, remark=why)


def _timed(grid: ResultGrid, cell: Cell, tolerance: float) -> AdviceCase | None:
    hosts = cell.workers if cell.link == "throttled" else 1
    wanted = Constraints(preemptible=cell.straggler == "paused", tolerance=tolerance, hosts=hosts)
    advice = advise(grid.loads.of(cell, grid.alone_s(cell)), wanted)
    return AdviceCase(
        cell,
        f"lose at most {tolerance:g} points",
        advice,
        accurate(grid, cell, tolerance),
        _speeds(grid, cell),
    )


def accurate(grid: ResultGrid, cell: Cell, tolerance: float) -> dict[str, float]:
    """Samples per second of all that lose no more points than these, and chance, against DDP."""
    base, speeds = grid.get(cell, "ddp"), _speeds(grid, cell)
    lost = {name: points(base, grid.get(cell, name)) for name in speeds}
    same = [0.0, *(each for name in SAME_STEPS if (each := lost.get(name)) is not None)]
    chance = max(MARGIN, max(same) - min(same))
    return {
        name: speed
        for name, speed in speeds.items()
        if (each := lost[name]) is not None and (name in SAME_STEPS or each <= tolerance + chance)
    }


def _short(grid: ResultGrid, cell: Cell) -> AdviceCase | None:
    """Half-way between FSDP's and DDP's peak: speeds are those of the same model, equal workers, native. All
    workers are used, however few of them the advice would do with."""
    needed = {each.strategy.name: _most_bytes(each) for each in grid.at(cell) if each.figures}
    peaks = {name: peak for name, peak in needed.items() if peak is not None}
    if not {"ddp", "fsdp"} <= set(peaks):
        return None
    room = (peaks["ddp"] + peaks["fsdp"]) / 2
    wanted = Constraints(memory_bytes=round(room / FULL))
    advice = advise(grid.loads.of(cell, grid.alone_s(cell)), wanted)
    every = _speeds(grid, Cell(cell.model, cell.workers))
    fit = {name: speed for name, speed in every.items() if peaks.get(name, room + 1) <= room}
    wish = f"{room / 2**20:.0f} MiB a host, all {cell.workers} workers used"
    return AdviceCase(cell, wish, advice, fit, every)


def _most_bytes(each: MeasuredStrategy) -> int | None:
    """What the fullest host has, with one worker on each; None: what the server takes is not known."""
    seen = each.figures[0]
    if each.strategy.protocol is None:
        return max(seen.peak_bytes)
    first = seen.first_host_bytes
    return None if first is None else max(first, *seen.peak_bytes)


def _speeds(grid: ResultGrid, cell: Cell) -> dict[str, float]:
    seen = {each.strategy.name: each.samples_per_s for each in grid.at(cell)}
    return {name: speed for name, speed in seen.items() if speed is not None}
