"""Tables T1 to T4 of the evaluation: speed, memory, parameter servers, links; formulas beside figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from paceline.plan.profile.units import size_text
from paceline.plan.strategy.models import Load, memory_bytes
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.harness.stats import at_edge
from paceline_bench.strategies.cells import Cell, Setup
from paceline_bench.strategies.outcome import CHANCE, MeasuredStrategy, StrategyFigures
from paceline_bench.strategies.told.formulas import (
    Loads,
    formula_name,
    server_bytes,
    state_bytes,
    step_bytes,
)

T1, T2 = "T1: throughput and speed-up", "T2: memory of a worker, and of a server"
T3, T4 = "T3: parameter servers, time and accuracy", "T4: fast and throttled links"
MOST_EFFICIENT = 1.05
TOLERATED = 0.02
"""Share of timed parts that may take longer than their device; beyond, the row says so."""


class ResultGrid:
    """All that was measured, by cell and strategy."""

    def __init__(self, measured: Iterable[MeasuredStrategy], setup: Setup, loads: Loads) -> None:
        self.setup, self.loads = setup, loads
        self._all = {(each.cell, each.strategy.name): each for each in measured}

    @property
    def cells(self) -> list[Cell]:
        """In the order in which they ran."""
        return list(dict.fromkeys(cell for cell, _ in self._all))

    def timed(self) -> list[Cell]:
        """Cells in which time counts."""
        return [cell for cell in self.cells if cell.kind != "memory"]

    def at(self, cell: Cell) -> list[MeasuredStrategy]:
        """All strategies of a cell."""
        return [each for (where, _), each in self._all.items() if where == cell]

    def get(self, cell: Cell, strategy: str) -> MeasuredStrategy | None:
        """One that has run; None if it did not, or did not end."""
        found = self.tried(cell, strategy)
        return found if found is not None and found.figures else None

    def tried(self, cell: Cell, strategy: str) -> MeasuredStrategy | None:
        """One that is of the cell, however it ended."""
        return self._all.get((cell, strategy))

    def speed(self, cell: Cell, strategy: str) -> float | None:
        """Samples per second."""
        found = self.get(cell, strategy)
        return None if found is None else found.samples_per_s

    def alone_s(self, cell: Cell) -> float:
        """What one worker takes for a global batch: its device's time, or what was seen of a lone one."""
        if cell.kind == "emulated":
            return self.setup.device_s
        lone = self.get(cell, "single")
        return self.setup.device_s if lone is None else lone.figures[0].iteration.median


def tables(grid: ResultGrid) -> list[BenchRow]:
    """All four, as far as there is something to show."""
    speed = [_speed(grid, each) for cell in grid.timed() for each in grid.at(cell)]
    short = [each for cell in grid.cells if cell.kind == "memory" for each in grid.at(cell)]
    memory = [row for each in short for row in _memory(grid, each)]
    servers = [_server(grid, each) for cell in grid.timed() for each in grid.at(cell) if _is_server(each)]
    apart = [each for cell in grid.timed() if cell.link != "native" for each in grid.at(cell)]
    links = [_link(grid, each) for each in apart if each.strategy.name != "single"]
    return [*speed, *memory, *servers, *links]


def about(cell: Cell) -> dict[str, Value]:
    """A cell, for people."""
    if cell.kind == "memory":
        return {"model": cell.model, "workers": cell.workers}
    return {
        "model": cell.model,
        "workers": cell.workers,
        "device": cell.kind,
        "link": cell.link,
        "straggler": cell.straggler,
    }


def over(above: float | None, below: float | None) -> float | None:
    """A ratio, where there is one."""
    return None if above is None or not below else above / below


def spread_text(values: Sequence[float], digits: int = 0, unit: str = "") -> str:
    """A median, and from where to where."""
    if not values:
        return ""
    middle = f"{median(values):,.{digits}f}{unit}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def change(ours: float | None, base: float | None, unit: str = " %") -> str:
    """By how much something is more or less."""
    ratio = over(ours, base)
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f}{unit}"


def _row(
    table: str, each: MeasuredStrategy, case: dict[str, Value], value: float | None, remark: str = ""
) -> BenchRow:
    whole = about(each.cell) | {"strategy": each.strategy.name} | case
    said = "; ".join(text for text in (_diverged(each), each.trouble, remark) if text)
    return BenchRow(table=table, case=whole, measured={}, figure="ratio", value=value, remark=said)


def _diverged(each: MeasuredStrategy) -> str:
    if not each.diverged:
        return ""
    runs = each.diverged + len(each.figures)
    return f"{each.diverged} of {runs} diverged, which counts as {100 * CHANCE:.0f} % accuracy"


def _speed(grid: ResultGrid, each: MeasuredStrategy) -> BenchRow:
    cell, speed = each.cell, each.samples_per_s
    gain = over(speed, grid.speed(cell, "single"))
    case: dict[str, Value] = {"seeds": len(each.figures), "samples/s": spread_text(each.speeds)}
    if each.figures and gain is not None and each.strategy.name != "single":
        case["iteration ms"] = _iteration(each.figures)
        case["exposed ms"] = f"{1e3 * _exposed(grid, each):.1f}"
        case["efficiency"] = f"{gain / cell.workers:.2f}"
        case["against ddp"] = change(speed, grid.speed(cell, "ddp"))
    said = [_late(each.figures, cell), _too_good(gain, cell)]
    return _row(T1, each, case, gain, "; ".join(filter(None, said)))


def _too_good(gain: float | None, cell: Cell) -> str:
    """N workers cannot be more than N times as fast."""
    if gain is None or gain <= MOST_EFFICIENT * cell.workers:
        return ""
    return f"efficiency above {MOST_EFFICIENT}: the lone worker was disturbed, do not trust it"


def _iteration(figures: list[StrategyFigures]) -> str:
    seen = figures[0].iteration
    return f"{1e3 * seen.median:.1f} ({1e3 * seen.p10:.1f}-{1e3 * seen.p90:.1f})"


def _exposed(grid: ResultGrid, each: MeasuredStrategy) -> float:
    """What an iteration takes beyond computing, in the middle of all workers."""
    cell = each.cell
    return max(0.0, each.figures[0].iteration.median - grid.alone_s(cell) / cell.workers)


def _late(figures: list[StrategyFigures], cell: Cell) -> str:
    late = max((each.late for each in figures), default=0.0)
    if late <= TOLERATED or cell.kind != "emulated":
        return ""
    return f"{100 * late:.0f} % of timed parts took longer than the emulated device"


def _memory(grid: ResultGrid, each: MeasuredStrategy) -> list[BenchRow]:
    """Of a worker; then of the server, where there is one."""
    if not each.figures:
        return [_row(T2, each, {}, None)]
    load, ddp = grid.loads.of(each.cell, 1.0), grid.get(each.cell, "ddp")
    theirs = None if ddp is None else max(ddp.figures[0].peak_bytes)
    rows = [_worker_memory(each, load, theirs)]
    if each.figures[0].server_bytes is not None:
        rows.append(_server_memory(each, load, theirs))
    return rows


def _worker_memory(each: MeasuredStrategy, load: Load, theirs: int | None) -> BenchRow:
    name = each.strategy.name
    held, peak = (max(sizes) for sizes in (each.figures[0].held_bytes, each.figures[0].peak_bytes))
    formula = memory_bytes(formula_name(name), load)
    case: dict[str, Value] = {
        "parameters": size_text(load.parameters),
        "state": size_text(held),
        "formula's state": size_text(state_bytes(name, load)),
        "peak": size_text(peak),
        "formula's peak": size_text(formula),
        "peak over formula": f"{peak / formula:.2f}",
    }
    return _row(T2, each, case, over(peak, theirs), "figure: peak over ddp's")


def _server_memory(each: MeasuredStrategy, load: Load, theirs: int | None) -> BenchRow:
    seen, formula = each.figures[0], server_bytes(load)
    peak, together = seen.server_bytes or 0, seen.first_host_bytes or 0
    case: dict[str, Value] = {
        "strategy": f"{each.strategy.name}'s server",
        "parameters": size_text(load.parameters),
        "peak": size_text(peak),
        "formula's peak": size_text(formula),
        "peak over formula": f"{peak / formula:.2f}",
        "in common with a worker": size_text(seen.shared_bytes),
        "first host, both": size_text(together),
    }
    return _row(T2, each, case, over(peak, theirs), "figure: peak over ddp's")


def _is_server(each: MeasuredStrategy) -> bool:
    return each.strategy.name.startswith("ps-") or each.strategy.ours or each.strategy.name == "ddp"


def _server(grid: ResultGrid, each: MeasuredStrategy) -> BenchRow:
    base, ddp = grid.get(each.cell, "ps-sync"), grid.get(each.cell, "ddp")
    times = [figures.total_s for figures in each.figures]
    case: dict[str, Value] = {"rate": each.lr, "seeds": len(times), "seconds": spread_text(times, 2)}
    case["time against ps-sync"] = change(_time(each), _time(base))
    case["time against ddp"] = change(_time(each), _time(ddp))
    case["accuracy %"] = spread_text([100 * share for share in each.accuracies], 1)
    case["points against ps-sync"] = _points(each, base)
    case |= _stale(each.figures)
    return _row(T3, each, case, over(_time(base), _time(each)), at_edge(each.lr, each.tried))


def _time(each: MeasuredStrategy | None) -> float | None:
    """All samples, in seconds, warming up left out."""
    return None if each is None else over(1.0, each.samples_per_s)


def points(each: MeasuredStrategy | None, base: MeasuredStrategy | None) -> float | None:
    """Of accuracy, more or less than another."""
    if each is None or base is None or each.accuracy is None or base.accuracy is None:
        return None
    return 100 * (each.accuracy - base.accuracy)


def _points(each: MeasuredStrategy, base: MeasuredStrategy | None) -> str:
    more = points(each, base)
    if more is None or base is None:
        return ""
    return f"{more:+.1f} ({change(each.accuracy, base.accuracy)})"


def _stale(figures: list[StrategyFigures]) -> dict[str, Value]:
    if not figures:
        return {}
    seen, waits, case = figures[0].staleness, figures[0].waits, dict[str, Value]()
    if seen is not None:
        case["staleness mean, p95, max"] = f"{seen.mean:.2f}, {seen.p95}, {seen.max}"
    if waits is not None:
        case["waited for the bound, for a new start"] = f"{waits.bound_s:.2f} s, {waits.resync_s:.2f} s"
    if figures[0].applied < 1:
        case["gradients used"] = f"{100 * figures[0].applied:.0f} %"
    return case


def _link(grid: ResultGrid, each: MeasuredStrategy) -> BenchRow:
    cell, name = each.cell, each.strategy.name
    fast = grid.speed(Cell(cell.model, cell.workers, straggler=cell.straggler), name)
    load = grid.loads.of(cell, grid.alone_s(cell))
    case: dict[str, Value] = {"samples/s": spread_text(each.speeds)}
    case["native samples/s"] = "" if fast is None else f"{fast:,.0f}"
    case["against ddp"] = change(each.samples_per_s, grid.speed(cell, "ddp"))
    if each.figures and (moved := each.figures[0].wire_bytes) is not None:
        steps = each.figures[0].last_steps or grid.setup.warm_up + grid.setup.iterations
        per_step, formula = moved / 2 / steps, step_bytes(name, load)
        case |= {"sent per step": size_text(per_step), "formula's": size_text(formula)}
        case["sent over formula"] = f"{per_step / formula:.2f}"
    share = over(each.samples_per_s, fast)
    return _row(T4, each, case, share, "" if share is None else "figure: of the native speed")
