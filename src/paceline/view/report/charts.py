"""The report's charts: curves over time, and histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.trace import Result
from paceline.view import figures
from paceline.view.palette import slots, slots_in_turn
from paceline.view.report.markup import Markup, element, join
from paceline.view.report.series import Point
from paceline.view.report.svg import Axis, Plot, Write, drawing, label, ticked, titled

WIDTH, WIDE, HEIGHT = 580.0, 1140.0, 330.0
LEFT, TOP, BOTTOM = 56.0, 36.0, 48.0
BARS = 32
LOG_FROM = 30.0
"""A curve that falls by this factor gets a logarithmic axis: on a linear one its end would lie flat."""
LABELLED_CURVES = 6
DOTTED_POINTS = 60
LABEL_STEP = 15.0
_DASHES = (None, "7 4", "2 4", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Look:
    """How a run appears in every chart: a colour per protocol, a dash per further run of it.

    When all runs are of one protocol, they get a colour each.
    """

    name: str
    short: str
    run: str
    """The class of all that belongs to the run, by which a legend hides it."""
    colour: str
    dash: str | None

    @property
    def css(self) -> str:
        """The classes of an element of this run."""
        return f"{self.run} {self.colour}"

    @property
    def swatch(self) -> str:
        """The classes of its colour where lines are told apart: a dashed line has a dashed one."""
        return self.colour if self.dash is None else f"{self.colour} dashed"


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's figure over time."""

    look: Look
    points: Sequence[Point]
    faint: bool = False
    """Drawn in the background, without dots and without a say in the label."""
    ring: Point | None = None
    """A point of note, with a ring around it."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a curve shows: its name with the unit, how values are written, and lines to compare with."""

    name: str
    write: Write | None = None
    """For the axis; None takes what tells the ticks apart."""
    say: Write = figures.number
    """For a single point."""
    marks: tuple[tuple[float, str], ...] = ()
    from_zero: bool = False
    wide: bool = False
    """Across the whole page."""
    dots: bool = True


def looks(results: Sequence[Result], names: Sequence[str]) -> list[Look]:
    """How each run appears."""
    found = [
        Look(name, _short(result, results), f"run-{number}", f"c-{colour}", dash)
        for number, (result, name, (colour, dash)) in enumerate(
            zip(results, names, _strokes(results), strict=True)
        )
    ]
    twice = Counter(look.short for look in found)
    return [
        replace(look, short=f"{look.short} #{number}") if twice[look.short] > 1 else look
        for number, look in enumerate(found, 1)
    ]


def _strokes(results: Sequence[Result]) -> list[tuple[str, str | None]]:
    protocols = [result.protocol for result in results]
    if len(set(protocols)) == 1:
        turn = slots_in_turn(protocols[0])
        return [(turn[at % len(turn)], _DASHES[at // len(turn) % len(_DASHES)]) for at in range(len(results))]
    colours, seen = slots(protocols), Counter[str]()
    strokes = []
    for protocol in protocols:
        strokes.append((colours[protocol], _DASHES[seen[protocol] % len(_DASHES)]))
        seen[protocol] += 1
    return strokes


def _short(result: Result, results: Sequence[Result]) -> str:
    """The protocol, and the settings in which it differs from its other runs."""
    same = [other for other in results if other.protocol == result.protocol]
    differing = {
        key: value
        for key, value in result.settings.items()
        if any(other.settings.get(key) != value for other in same)
    }
    return figures.title(result, differing)[:22]


def line_chart(curves: Sequence[Curve], measure: Measure, until: float) -> Markup:
    """Curves of several runs over one time axis."""
    named = [curve for curve in curves if not curve.faint] or list(curves)
    labelled = named if len(named) <= LABELLED_CURVES else []
    right = 14 + 7.0 * max((len(curve.look.short) for curve in labelled), default=0)
    width = WIDE if measure.wide else WIDTH
    x = Axis(0.0, until or 1.0, LEFT, width - right)
    plot = Plot(x, _value_axis(curves, measure))
    write = measure.write or ticked(plot.y.ticks())
    if plot.y.log:
        write = figures.number
    parts = [plot.frame("seconds since the run began", measure.name, ticked(x.ticks(6)), write)]
    parts += [_mark(plot, value, text) for value, text in measure.marks]
    parts += [_curve(plot, curve, measure) for curve in sorted(curves, key=lambda curve: not curve.faint)]
    parts += _end_labels(plot, labelled)
    return drawing(width, HEIGHT, f"{measure.name} over time", *parts)


def _value_axis(curves: Sequence[Curve], measure: Measure) -> Axis:
    values = [value for curve in curves for _, value in curve.points]
    values += [value for value, _ in measure.marks]
    low, high = min(values), max(values)
    first, last = HEIGHT - BOTTOM, TOP
    if not measure.from_zero and measure.write is None and low > 0 and high / low >= LOG_FROM:
        return Axis(low / 1.1, high * 1.1, first, last, log=True)
    room = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    bottom = 0.0 if measure.from_zero or 0 <= low < room * 5 else low - room
    return Axis(bottom, high + room, first, last)


def _mark(plot: Plot, value: float, text: str) -> Markup:
    y = plot.y(value)
    line = element("line", x1=plot.x.first, x2=plot.x.last, y1=y, y2=y, class_="mark")
    return join([line, label(plot.x.first + 5, y - 6, text, "note")])


def _curve(plot: Plot, curve: Curve, measure: Measure) -> Markup:
    parts = [plot.path(curve.points, "line faint" if curve.faint else "line", curve.look.dash)]
    if measure.dots and not curve.faint and len(curve.points) <= DOTTED_POINTS:
        parts += [plot.dot(point, "dot", _say(curve.look, point, measure), 3.0) for point in curve.points]
    if curve.ring is not None:
        reached = f"target reached: {_say(curve.look, curve.ring, measure)}"
        parts.append(plot.dot(curve.ring, "ring", reached, 6.5))
    return element("g", element("title", curve.look.name), *parts, class_=curve.look.css)


def _say(look: Look, point: Point, measure: Measure) -> str:
    return f"{look.name}: {measure.say(point[1])} after {figures.seconds(point[0])}"


def _end_labels(plot: Plot, curves: Sequence[Curve]) -> list[Markup]:
    """Each run's name at the right of the chart, as high as its curve ends or as near as there is room."""
    ends = sorted((plot.y(curve.points[-1][1]), at) for at, curve in enumerate(curves))
    heights = spread([y for y, _ in ends], plot.y.last, plot.y.first)
    parts = []
    for y, (_, at) in zip(heights, ends, strict=True):
        look = curves[at].look
        parts.append(element("g", label(plot.x.last + 8, y + 4, look.short, "end"), class_=look.css))
    return parts


def spread(wanted: Sequence[float], top: float, bottom: float) -> list[float]:
    """Ascending heights, moved apart by a label's height and kept within the chart where there is room."""
    heights: list[float] = []
    for y in wanted:
        heights.append(max(y, heights[-1] + LABEL_STEP) if heights else max(y, top))
    limit = bottom
    for at in reversed(range(len(heights))):
        heights[at] = min(heights[at], limit)
        limit = heights[at] - LABEL_STEP
    return heights


def histogram(counts: Counter[int], look: Look, highest: int) -> Markup:
    """How many gradients had each staleness; `highest` is common to all runs, so that they compare."""
    wide = -(-(highest + 1) // BARS)
    bars = Counter[int]()
    for value, times in counts.items():
        bars[value // wide] += times
    total, number = bars.total(), highest // wide + 1
    x = Axis(0.0, float(number), 44.0, 276.0)
    plot = Plot(x, Axis(0.0, max(bars.values()) / total * 1.05, 148.0, 30.0))
    parts = [_histogram_frame(plot, number, wide)]
    parts += [_bar(plot, at, times / total, wide) for at, times in sorted(bars.items())]
    body = element("g", *parts, class_=look.css)
    return drawing(280, 190, f"staleness of the gradients of {look.name}", body)


def _histogram_frame(plot: Plot, number: int, wide: int) -> Markup:
    shown = range(0, number, max(1, -(-number // 7)))
    parts = [label(plot.x(at + 0.5), 165.0, str(at * wide), "tick", "middle") for at in shown]
    frame = plot.frame("staleness in optimizer steps", "share of gradients", None, figures.percent)
    return join([frame, *parts])


def _bar(plot: Plot, at: int, share: float, wide: int) -> Markup:
    left, right, top = plot.x(at + 0.08), plot.x(at + 0.92), plot.y(share)
    which = str(at * wide) if wide == 1 else f"{at * wide} to {at * wide + wide - 1}"
    shape = element(
        "rect", x=left, y=top, width=right - left, height=plot.y.first - top, rx=1.5, class_="bar"
    )
    return titled(f"staleness {which}: {100 * share:.3g} % of gradients", shape)
