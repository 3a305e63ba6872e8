"""Charts as inline SVG: axes, scales, labels. Colours come from the page's style sheet.

Sizes are in units of the view box; a chart grows and shrinks with the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from paceline.view.report.markup import Markup, element, join, short
from paceline.view.report.series import Point

Write = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values -> positions along one side of the plot."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Where the value lies."""
        low, high = self.low, self.high
        if self.log:
            value, low, high = log10(max(value, low)), log10(low), log10(high)
        return self.first + (value - low) / (high - low) * (self.last - self.first)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values to label."""
        return _log_ticks(self.low, self.high) if self.log else round_steps(self.low, self.high, about)


@dataclass(frozen=True, slots=True)
class Plot:
    """A rectangle with an axis below and one at the left."""

    x: Axis
    y: Axis

    def frame(self, x_name: str, y_name: str, write_x: Write | None, write_y: Write) -> Markup:
        """Grid lines, tick labels (below only with `write_x`), and what is measured in which unit."""
        left, right, top, bottom = self.x.first, self.x.last, self.y.last, self.y.first
        parts = [self._grid(tick, write_y(tick)) for tick in self.y.ticks()]
        if write_x is not None:
            ticks = self.x.ticks(6)
            parts += [label(self.x(tick), bottom + 17, write_x(tick), "tick", "middle") for tick in ticks]
        parts.append(element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
        parts.append(label((left + right) / 2, bottom + 36, x_name, "name", "middle"))
        parts.append(label(left, top - 12, y_name, "name"))
        return join(parts)

    def path(self, points: Sequence[Point], css: str, dash: str | None = None) -> Markup:
        """A line through the points."""
        steps = " ".join(f"{short(self.x(x))},{short(self.y(y))}" for x, y in points)
        return element("path", d=f"M{steps}", class_=css, stroke_dasharray=dash)

    def dot(self, point: Point, css: str, title: str, radius: float) -> Markup:
        """A point that says what it is when pointed at."""
        x, y = self.x(point[0]), self.y(point[1])
        return titled(title, element("circle", cx=x, cy=y, r=radius, class_=css))

    def _grid(self, tick: float, text: str) -> Markup:
        y = self.y(tick)
        line = element("line", x1=self.x.first, x2=self.x.last, y1=y, y2=y, class_="grid")
        return join([line, label(self.x.first - 8, y + 4, text, "tick", "end")])


def drawing(width: float, height: float, description: str, *children: Markup, css: str = "") -> Markup:
    """A whole chart, with the words a screen reader says for it."""
    box = f"0 0 {short(width)} {short(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=description, class_=css or None)


def label(x: float, y: float, text: str, css: str, anchor: str | None = None) -> Markup:
    """Words in a chart."""
    return element("text", text, x=x, y=y, class_=css, text_anchor=anchor)


def titled(title: str, *children: Markup) -> Markup:
    """Elements that show a tooltip."""
    return element("g", element("title", title), *children)


def round_steps(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that lie within the range."""
    step = _round_step((high - low) / about)
    first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def ticked(step_of: Sequence[float]) -> Write:
    """Writes tick values with just the decimals that tell them apart."""
    step = min((b - a for a, b in pairwise(step_of)), default=1.0)
    decimals = max(0, ceil(-log10(step) - 1e-9)) if step > 0 else 0
    return lambda value: f"{value:,.{decimals}f}"


def _round_step(rough: float) -> float:
    power = 10.0 ** floor(log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(log10(step / rough)))


def _log_ticks(low: float, high: float) -> list[float]:
    powers = [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
    finer = [factor * power for power in powers for factor in (1, 2, 5)]
    fine, coarse = ([v for v in values if low <= v <= high] for values in (finer, powers))
    return fine if len(fine) <= 7 else coarse[:: -(-len(coarse) // 7)]
