"""The report's charts of bytes: what each worker sent, and what each run came to.

Bytes count as they would be sent, compressed if the run compressed them, whether or not there was a wire.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.trace import Result
from paceline.view import figures
from paceline.view.report.charts import BARS, LEFT, TOP, WIDE, Look
from paceline.view.report.markup import Markup, element, join
from paceline.view.report.page import figure, paragraph, swatch
from paceline.view.report.svg import Axis, Plot, drawing, label, titled

LETTER, ROW = 6.6, 26.0
"""Roughly the width of a letter, and the height of a run's row."""
UNKNOWN = "The amount of traffic is unknown, because the trace does not contain the size of the model."
ONLY_SUMS = "The trace is summarised: it has no figures of single workers."


def traffic(runs: Sequence[tuple[Result, Look]]) -> list[Markup]:
    """All runs against each other, then the workers of each."""
    known = [(result, look) for result, look in runs if result.bytes_sent is not None]
    if not known:
        return [paragraph(UNKNOWN, "absent")]
    parts = []
    if len(known) > 1:
        parts.append(figure(by_run(known), Markup("Sent by all workers of a run"), wide=True))
    drawn = [_of_run(result.bytes_sent_each, look, result.bytes_by_axis) for result, look in known]
    return [*parts, element("div", *drawn, class_="many")]


def _of_run(sent: list[int] | None, look: Look, axes: dict[str, int] | None) -> Markup:
    heading = swatch(look.swatch, look.short)
    drawn = paragraph(ONLY_SUMS, "absent") if sent is None else by_worker(sent, look)
    return figure(drawn, heading, figures.by_axis(axes) if axes else "")


def by_run(runs: Sequence[tuple[Result, Look]]) -> Markup:
    """A bar per run, its figure behind it: next to a large one a small one may be too thin to see."""
    totals = [(result.bytes_sent or 0, look) for result, look in runs]
    first = 20 + LETTER * max(len(look.short) for _, look in totals)
    bottom = TOP + ROW * len(totals)
    x = Axis(0.0, float(max(max(total for total, _ in totals), 1)), first, WIDE - 90)
    rows = [_row(x, TOP + ROW * at, total, look) for at, (total, look) in enumerate(totals)]
    line = element("line", x1=first, x2=first, y1=TOP - 4, y2=bottom, class_="axis")
    name = label(first, TOP - 12, "bytes sent", "name")
    return drawing(WIDE, bottom + 8, "bytes sent by each run", name, line, *rows)


def _row(x: Axis, top: float, total: int, look: Look) -> Markup:
    middle = top + ROW / 2 + 4
    bar = element(
        "rect", x=x.first, y=top + 4, width=x(total) - x.first, height=ROW - 8, rx=1.5, class_="bar"
    )
    told = titled(f"{look.name}: {figures.size(total)} sent", bar)
    words = [
        label(x.first - 8, middle, look.short, "tick", "end"),
        label(x(total) + 8, middle, figures.size(total), "tick"),
    ]
    return element("g", told, *words, class_=look.css)


def by_worker(sent: Sequence[int], look: Look) -> Markup:
    """A bar per worker; of many workers, one for several that follow each other, as high as their mean."""
    together = max(1, -(-len(sent) // BARS))
    groups = [sent[at : at + together] for at in range(0, len(sent), together)]
    means = [sum(group) / len(group) for group in groups]
    plot = Plot(
        Axis(0.0, float(len(groups)), LEFT + 8, 276.0), Axis(0.0, 1.05 * max(*means, 1.0), 148.0, 30.0)
    )
    parts = [plot.frame("rank", "bytes sent per worker", None, figures.size), _ranks(plot, groups)]
    parts += [_bar(plot, at, mean, together, len(sent)) for at, mean in enumerate(means)]
    body = element("g", *parts, class_=look.css)
    return drawing(280, 190, f"bytes sent by each worker of {look.name}", body)


def _ranks(plot: Plot, groups: Sequence[Sequence[int]]) -> Markup:
    shown = range(0, len(groups), max(1, -(-len(groups) // 7)))
    return join(label(plot.x(at + 0.5), 165.0, str(at * len(groups[0])), "tick", "middle") for at in shown)


def _bar(plot: Plot, at: int, mean: float, together: int, workers: int) -> Markup:
    left, right, top = plot.x(at + 0.08), plot.x(at + 0.92), plot.y(mean)
    first, last = at * together, min((at + 1) * together, workers) - 1
    who = f"rank {first}" if first == last else f"ranks {first} to {last}, on average"
    shape = element(
        "rect", x=left, y=top, width=right - left, height=plot.y.first - top, rx=1.5, class_="bar"
    )
    return titled(f"{who}: {figures.size(mean)} sent", shape)
