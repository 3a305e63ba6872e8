"""Results in the terminal: several side by side, or one with all its figures.

Both return renderables and print nothing, so that the caller decides between standard output and
standard error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.trace import Result
from paceline.trace.tally import Failure
from paceline.view import figures
from paceline.view.compare import CompareRow, Comparison, compare
from paceline.view.palette import terminal_colour

LEAST_MISSED = ("max_gap", "staleness", "waiting")
"""Columns in the order in which they are left out of a narrow terminal."""


UNROLLED = 160
"""Characters in a line of a file or a pipe, where no terminal says how many there are room for."""


def print_comparison(results: Sequence[Result], console: Console) -> None:
    """Print them side by side, as wide as the terminal or COLUMNS allow."""
    if not (console.is_terminal or "COLUMNS" in os.environ):
        console.width = UNROLLED
    console.print(comparison(results, console.width))


def comparison(results: Sequence[Result], width: int | None = None) -> Table:
    """One row per run; what is unknown of all of them has no column, nor what does not fit the width."""
    content = compare(results)
    told, left_out = _fitting(content, width)
    caption = Text(content.caption + left_out, style="dim")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, caption=caption)
    table.caption_justify = "left"
    table.add_column(content.headings[0], no_wrap=True)
    for index in told:
        table.add_column(content.headings[index], justify="right", no_wrap=True)
    for result, row in zip(results, content.rows, strict=True):
        table.add_row(_label(result.protocol, row.label), *(_cell(row[i]) for i in told))
    return table


def _fitting(content: Comparison, width: int | None) -> tuple[list[int], str]:
    """The columns that are shown, and a sentence about the others."""
    rows = [content.headings, *content.rows]
    told = [i for i in range(1, len(content.headings)) if any(row[i] != figures.DASH for row in content.rows)]
    missed: list[str] = []
    for name in LEAST_MISSED:
        taken = sum(max(len(row[i]) for row in rows) + 2 for i in [0, *told])
        index = CompareRow._fields.index(name)
        if width is not None and taken > width and index in told:
            told.remove(index)
            missed.append(content.headings[index])
    return told, f" Left out, for want of room: {', '.join(missed)}." if missed else ""


def summary(result: Result) -> RenderableType:
    """What one run came to, in a few lines."""
    title = figures.title(result, result.settings)
    head = Text.assemble(
        _label(result.protocol, title),
        f" · {figures.plural(result.workers, 'worker')} · ",
        (result.status, "green" if result.status == "finished" else "bold red"),
        f" after {figures.seconds(result.seconds)}{' (simulated)' if result.simulated else ''}",
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _facts(result):
        grid.add_row(f"  {name}", Text(value))
    for failure in result.failures:
        grid.add_row("  failure", Text(_failure(failure), style="red"))
    return Group(head, grid)


def _label(protocol: str, label: str) -> Text:
    text = Text(label)
    text.stylize(f"bold {terminal_colour(protocol)}", 0, len(protocol))
    return text


def _cell(value: str) -> Text:
    return Text(value, style="dim" if value == figures.DASH else "")


def _facts(result: Result) -> list[tuple[str, str]]:
    known = figures.known
    rate = known(result.samples_per_s, figures.rate)
    facts = [
        ("samples", f"{figures.done_of(result.samples, result.samples_due)} at {rate} per second"),
        ("updates", figures.count(result.updates)),
        (
            "loss",
            known(result.loss, figures.number) + figures.moment(result, result.loss_at) + _no_loss(result),
        ),
        ("accuracy", _accuracy(result) + _target(result)),
        ("waiting", _waiting(result)),
        ("staleness", _staleness(result)),
        ("max gap", known(result.max_clock_gap, _gap)),
        ("moved", _moved(result)),
    ]
    if result.simulated:  # of times alone, a dash is no news
        facts = [(name, told) for name, told in facts if told != figures.DASH]
    if result.lssr is not None:
        facts.append(("local steps", f"{figures.percent(result.lssr)} (LSSR)"))
    if result.sent_ahead is not None:
        facts.append(
            ("put off", f"{figures.percent(result.sent_ahead)} of the bytes sent, while workers went on")
        )
    if result.consensus_distance is not None:
        distance = figures.number(result.consensus_distance)
        facts.append(("apart", f"{distance} from the mean of all replicas, when last measured"))
    if result.landscape is not None:
        facts += figures.landscape(result.landscape)
    if result.dropped:
        share = figures.percent(result.dropped / max(result.iterations or 0, 1))
        facts.append(("dropped", f"{figures.plural(result.dropped, 'gradient')}, {share} of all"))
    if result.trigger is not None:
        share, told = figures.percent(result.trigger.pushed), result.trigger
        facts.append(("pushed", f"{share} of {told.steps} gradients, {told.triggered} times by their norm"))
    if result.lookups is not None:
        facts.append(("lookups", figures.lookups(result.lookups)))
    return facts + [_kind(text) for text in figures.kinds([result])]


def _kind(text: str) -> tuple[str, str]:
    name, _, detail = text.partition(": ")
    return name, detail or "all times are virtual"


def _accuracy(result: Result) -> str:
    if result.accuracy is None and result.status == "finished" and not result.simulated:
        return f"{figures.DASH} (the script reports none, see pace.evaluate)"
    return figures.known(result.accuracy, figures.accuracy) + figures.moment(result, result.accuracy_at)


def _no_loss(result: Result) -> str:
    """Why there is a dash."""
    if result.loss_missing is None:
        return ""
    if result.loss_missing == "not finite":
        return " (NaN or infinity was reported: training diverged)"
    return " (the script does not call pace.report(loss=...))"


def _target(result: Result) -> str:
    if result.target is None:
        return ""
    goal = figures.threshold(result.target)
    if result.time_to_target_s is None:
        return f" (target {goal} not reached)"
    return f" (target {goal} after {figures.seconds(result.time_to_target_s)})"


def _gap(gap: int) -> str:
    return f"{figures.plural(gap, 'iteration')} between the fastest and the slowest worker"


def _waiting(result: Result) -> str:
    shares, told = result.waiting_share, figures.waiting(result.waiting_share)
    if len(shares) > figures.MANY_WORKERS or told == figures.DASH:
        return told
    each = ", ".join(figures.known(share, figures.percent) for share in shares)
    return f"{each} of the time of ranks 0 to {len(shares) - 1}" if len(shares) > 1 else f"{each} of its time"


def _staleness(result: Result) -> str:
    if result.staleness is None:
        return figures.DASH
    known = result.staleness
    return f"mean {known.mean:.1f} updates, 95th percentile {known.p95}, max {known.max}"


def _moved(result: Result) -> str:
    if result.bytes_sent is None or result.bytes_received is None:
        return figures.DASH
    moved = f"{figures.size(result.bytes_sent)} sent, {figures.size(result.bytes_received)} received"
    return f"{moved}: {figures.by_axis(result.bytes_by_axis)}" if result.bytes_by_axis else moved


def _failure(failure: Failure) -> str:
    detail = f": {failure.detail}" if failure.detail else ""
    return f"rank {failure.worker} {failure.reason} after {figures.seconds(failure.t)}{detail}"
