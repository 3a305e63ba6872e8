"""The workers of a live run as a table: who computes, who waits, who leads by how much."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from paceline.view import figures
from paceline.view.terminal.workers import (
    AWAY,
    COMPUTING,
    DIED,
    FAILED,
    LEFT,
    SILENT,
    STATES,
    WAITING,
    Workers,
    WorkerStatus,
)

MANY_WORKERS = 16
"""Beyond this, the view shows how many are in each state, and only the slowest one by one."""
SLOWEST_SHOWN = 8
_OTHER_COLUMNS = 56
_LEAD_CELLS = (8, 40)

_STYLES = {
    COMPUTING: "green",
    WAITING: "yellow",
    SILENT: "bold red",
    AWAY: "blue",
    LEFT: "dim",
    DIED: "bold red",
    FAILED: "bold red",
}


def workers_table(
    shown: list[WorkerStatus],
    leads: Mapping[int, int],
    waited: Mapping[int, float | None],
    lead_scale: int,
    width: int,
) -> Table:
    """One line per worker. `lead_scale` fills the bar: it only grows, so that the view stays calm."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("state", min_width=len(COMPUTING))
    for name in ("iteration", "staleness", "waited", "lead"):
        table.add_column(name, justify="right")
    table.add_column("")
    low, high = _LEAD_CELLS
    cells = max(low, min(high, width - _OTHER_COLUMNS))
    for worker in shown:
        lead = leads.get(worker.rank)
        table.add_row(*_cells(worker, lead, waited.get(worker.rank)), _lead_bar(lead, lead_scale, cells))
    return table


def state_line(workers: Workers) -> Text:
    """How many workers are in each state, on one line."""
    states = workers.states()
    line = Text(f"{figures.plural(len(workers.by_rank), 'worker')}: ")
    parts = [Text(f"{states[state]:,} {state}", style=_STYLES[state]) for state in STATES if states[state]]
    return line + Text(" · ", style="dim").join(parts)


def _cells(worker: WorkerStatus, lead: int | None, waited: float | None) -> list[Text]:
    quiet = "" if worker.active else "dim"
    return [
        Text(str(worker.rank), style=quiet),
        Text(worker.state, style=_STYLES[worker.state]),
        Text(figures.count(worker.clock), style=quiet),
        Text(figures.known(worker.staleness, figures.count), style=quiet),
        Text(figures.known(waited, figures.percent), style=quiet),
        Text(figures.known(lead, figures.count), style=quiet),
    ]


def _lead_bar(lead: int | None, scale: int, cells: int) -> Text:
    if lead is None:
        return Text("")
    filled = min(cells - 1, round(lead * (cells - 1) / scale))
    return Text.assemble(("━" * filled, "dim"), "●", ("╌" * (cells - 1 - filled), "dim"))
