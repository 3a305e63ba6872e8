"""The timeline of a run: what every worker did, second by second, in a window where bars can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import mean, median

from paceline.view import figures
from paceline.view.report.markup import Markup, element, join
from paceline.view.report.record import RunRecord
from paceline.view.report.spans import State, StateSpan
from paceline.view.report.svg import Axis, Plot, drawing, label, ticked, titled

WIDTH, LEFT, RIGHT = 1140.0, 66.0, 76.0
ROW, BAR = 25.0, 19.0
TOP, BOTTOM = 22.0, 44.0
ROWS_SHOWN = 12
BARS_IN_ALL = 6000
"""Over all timelines of a page, roughly: each costs about a hundred bytes."""
THINNEST = 1.0
"""Bars narrower than this are drawn together."""
HAIRLINE = 0.8
"""Between bars, so that iterations without a wait can be counted."""
_VERBS: dict[State, str] = {"compute": "computes", "wait": "waits", "exchange": "exchanges"}

Window = tuple[float, float]


def windows(records: Sequence[RunRecord]) -> list[Window | None]:
    """The stretch of time to show of each run; one length for all unless their paces are worlds apart."""
    lengths = [_length(record, len(records)) if record.spans else None for record in records]
    known = [length for length in lengths if length is not None]
    if known and max(known) <= 4 * min(known):
        middle = sqrt(min(known) * max(known))
        lengths = [None if length is None else middle for length in lengths]
    return [
        None if length is None else _window(record, length)
        for record, length in zip(records, lengths, strict=True)
    ]


def timeline(record: RunRecord, window: Window) -> Markup:
    """One row per worker."""
    ranks = rows(record)
    height = TOP + ROW * len(ranks) + BOTTOM
    x = Axis(*window, LEFT, WIDTH - RIGHT)
    plot = Plot(x, Axis(0.0, 1.0, height - BOTTOM, TOP))
    parts = [_frame(plot, height), label(WIDTH - RIGHT + 10, TOP - 8, "waiting", "name")]
    for number, rank in enumerate(ranks):
        parts.append(_row(record, rank, x, TOP + ROW * number))
    return drawing(WIDTH, height, f"timeline of run {record.start.run}", *parts)


def rows(record: RunRecord) -> list[int]:
    """The workers to show: all, or those with the longest and the shortest iterations."""
    ranks = sorted(record.spans)
    if len(ranks) <= ROWS_SHOWN:
        return ranks
    by_pace = sorted(ranks, key=lambda rank: -_compute_s(record.spans[rank]))
    half = ROWS_SHOWN // 2
    return sorted(by_pace[:half] + by_pace[-half:])


def merged(spans: Sequence[StateSpan], thinnest_s: float) -> list[StateSpan]:
    """The spans, with neighbours too thin to be seen drawn as one in the state that took most of them."""
    out: list[StateSpan] = []
    thin: list[StateSpan] = []
    for span in spans:
        apart = thin and span.start - thin[-1].end > thinnest_s
        if thin and (apart or span.seconds >= thinnest_s or _extent(thin) >= thinnest_s):
            out.append(_together(thin))
            thin = []
        if span.seconds >= thinnest_s:
            out.append(span)
        else:
            thin.append(span)
    return [*out, _together(thin)] if thin else out


def _extent(spans: Sequence[StateSpan]) -> float:
    return spans[-1].end - spans[0].start


def _together(spans: Sequence[StateSpan]) -> StateSpan:
    totals: dict[State, float] = {}
    for span in spans:
        totals[span.state] = totals.get(span.state, 0.0) + span.seconds
    return StateSpan(
        spans[0].worker, max(totals, key=lambda state: totals[state]), spans[0].start, spans[-1].end
    )


def _length(record: RunRecord, runs: int) -> float:
    """Long enough for the page's share of bars, at the pace of the fastest worker; or the whole run."""
    per_row = BARS_IN_ALL / (runs * len(rows(record)))
    iterations = max(10.0, min(36.0, per_row / 3))
    length = iterations * min(_iteration_s(spans) for spans in record.spans.values())
    whole = record.tally.now - _begin(record)
    return whole if whole <= 1.5 * length else length


def _window(record: RunRecord, length: float) -> Window:
    begin = _begin(record)
    length = min(length, max(record.cut_s - begin, length / 4))
    return begin, begin + max(length, 1e-6)


def _begin(record: RunRecord) -> float:
    return min(spans[0].start for spans in record.spans.values())


def _iteration_s(spans: Sequence[StateSpan]) -> float:
    starts = [span.start for span in spans if span.state == "compute"]
    steps = [after - before for before, after in pairwise(starts)]
    return median(steps) if steps else _extent(spans)


def _compute_s(spans: Sequence[StateSpan]) -> float:
    return mean([span.seconds for span in spans if span.state == "compute"] or [0.0])


def _frame(plot: Plot, height: float) -> Markup:
    bottom, top, ticks = plot.y.first, plot.y.last, plot.x.ticks(10)
    write = ticked(ticks)
    parts = []
    for tick in ticks:
        x = plot.x(tick)
        parts.append(element("line", x1=x, x2=x, y1=top - 4, y2=bottom, class_="grid"))
        parts.append(label(x, bottom + 16, write(tick), "tick", "middle"))
    middle = (plot.x.first + plot.x.last) / 2
    parts.append(label(middle, height - 8, "seconds since the run began", "name", "middle"))
    return join(parts)


def _row(record: RunRecord, rank: int, x: Axis, y: float) -> Markup:
    share = record.result.waiting_share[rank] if rank < record.start.workers else None
    inside = [span for span in record.spans[rank] if span.end > x.low and span.start < x.high]
    bars = merged(inside, THINNEST * (x.high - x.low) / (x.last - x.first))
    parts = [label(LEFT - 10, y + 14, figures.lane(record.start, rank), "tick", "end")]
    parts += [_bar(span, x, y) for span in bars]
    parts += [
        _cross(left.t, rank, left.reason, x, y)
        for left in record.lost
        if left.worker == rank and x.low <= left.t <= x.high
    ]
    parts.append(label(WIDTH - RIGHT + 10, y + 14, figures.known(share, figures.percent), "tick"))
    return join(parts)


def _bar(span: StateSpan, x: Axis, y: float) -> Markup:
    left, right = x(max(span.start, x.low)), x(min(span.end, x.high))
    width = right - left - (HAIRLINE if right - left > 4 * HAIRLINE else 0.0)
    shape = element("rect", x=left, y=y, width=max(width, HAIRLINE), height=BAR, class_=span.state)
    took = f"rank {span.worker} {_VERBS[span.state]} for {figures.seconds(span.seconds)}"
    return titled(f"{took}, from {span.start:.2f} s", shape)


def _cross(t: float, rank: int, reason: str, x: Axis, y: float) -> Markup:
    at, middle = x(t), y + BAR / 2
    shape = f"M{at - 5:.1f},{middle - 5:.1f} l10,10 m0,-10 l-10,10"
    return titled(
        f"rank {rank} {reason} after {figures.seconds(t)}", element("path", d=shape, class_="cross")
    )
