"""The papers' claims as a picture: our figure as a dot, its range over seeds as a line, the rule as bands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from math import copysign, inf, log10
from typing import NamedTuple

from paceline_bench.harness.record import BenchRow
from paceline_bench.papers.recipe import Figure, Recipe, Unit, value_of

NAMES, PANEL, TEXT, ROW, HEAD = 380, 420, 210, 20, 58
NEAR, PARTLY, GRID = "#bfe5cf", "#f6e7b5", "#d8dbe0"
COLOURS = {"reproduced": "#0b6e4f", "partly": "#a06a00", "not": "#b3261e", "by construction": "#4a5a9a"}
UNJUDGED = "#5b6472"
Bounds = tuple[float, float]
END = r"([-+\d.]+|never)"
"""Of a range over seeds."""


class Scale(NamedTuple):
    """One panel: which figures, and where they are drawn."""

    title: str
    units: tuple[Unit, ...]
    place: Callable[[float], float]
    """A number that grows evenly along the axis."""
    ticks: tuple[float, ...]
    relative: bool = False
    """Whether a figure is drawn over the published one."""

    def part(self, value: float) -> float:
        """Where along the axis, from 0 to 1; what is beyond an end is drawn there."""
        first, last = self.place(self.ticks[0]), self.place(self.ticks[-1])
        if value in (inf, -inf):
            return float(value > 0)
        return min(1.0, max(0.0, (self.place(value) - first) / (last - first)))


class Judged(NamedTuple):
    """A figure of the picture."""

    name: str
    value: float
    seeds: Bounds
    figure: Figure
    shown: str
    verdict: str

    def over(self, published: float) -> Judged:
        """The same as a multiple."""
        figure = Figure(
            name=self.figure.name,
            published=self.figure.published,
            reproduced=_divided(self.figure.reproduced or (inf, -inf), published),
            partly=_divided(self.figure.partly, published),
        )
        seeds = _divided(self.seeds, published)
        return self._replace(value=self.value / published, seeds=seeds, figure=figure)


def _logarithm(value: float) -> float:
    return log10(max(value, 1e-9))


def _signed_logarithm(value: float) -> float:
    return copysign(log10(1 + abs(value)), value)


SCALES = (
    Scale("Ratios", ("ratio",), _logarithm, (0.1, 0.3, 1, 3, 10, 30, 100, 500)),
    Scale("Points of accuracy", ("points",), _signed_logarithm, (-70, -30, -10, -3, -1, 0, 1, 3, 10, 30)),
    Scale(
        "Other figures, over the published ones",
        ("share", "seconds", "count"),
        _logarithm,
        (0.2, 0.5, 1, 2, 5),
        relative=True,
    ),
)


def picture(rows: Iterable[BenchRow], recipes: Mapping[str, Recipe]) -> str:
    """All judged figures, a panel for each kind; nothing if there are none."""
    judged = [found for row in rows if (found := _judged(row, recipes)) is not None]
    parts, y = [], 24
    for scale in SCALES:
        chosen = [each for each in judged if each.figure.unit in scale.units]
        if chosen:
            parts += _panel(scale, chosen, y)
            y += HEAD + ROW * len(chosen) + 24
    return _framed(parts, y) if parts else ""


def _judged(row: BenchRow, recipes: Mapping[str, Recipe]) -> Judged | None:
    recipe = recipes.get(str(row.case.get("recipe")))
    figures = () if recipe is None else recipe.figures
    figure = next((each for each in figures if each.name == row.case["claimed"]), None)
    value = value_of(row)
    if figure is None or figure.reproduced is None or value is None:
        return None
    name, shown = f"{row.case['recipe']}: {figure.name}", row.shown or row.remark
    seeds = _seeds(row, figure.unit, value)
    return Judged(name, value, seeds, figure, f"{shown}; {figure.published}", str(row.case["verdict"]))


def _seeds(row: BenchRow, unit: Unit, value: float) -> Bounds:
    """From the words of the table; without a range the median."""
    found = re.match(rf"{END}\D*? to {END}", str(row.case.get("over seeds", "")))
    if found is None or unit == "seconds":
        return value, value
    by = 0.01 if unit == "share" else 1.0
    low, high = (inf if end == "never" else by * float(end) for end in found.groups())
    return low, high


def _panel(scale: Scale, chosen: list[Judged], top: int) -> list[str]:
    bottom = top + HEAD + ROW * len(chosen)
    parts = [_text(NAMES, top, scale.title, bold=True)]
    for tick in scale.ticks:
        x = NAMES + PANEL * scale.part(tick)
        parts += [f'<path d="M{x:.1f} {top + HEAD - 26}V{bottom}" stroke="{GRID}"/>']
        parts.append(_text(x, top + HEAD - 32, f"{tick:g}", "middle"))
    parts.append(_text(NAMES + PANEL + 14, top + HEAD - 32, "here; published"))
    for number, each in enumerate(chosen):
        parts += _line(scale, each, top + HEAD - 18 + ROW * number)
    return parts


def _line(scale: Scale, each: Judged, y: int) -> list[str]:
    drawn = each
    if scale.relative and each.figure.reproduced is not None:
        drawn = each.over(_published(each.figure.reproduced))
    colour = COLOURS.get(each.verdict, UNJUDGED)
    low, high, at = (NAMES + PANEL * scale.part(value) for value in (*drawn.seeds, drawn.value))
    middle = y + ROW / 2
    return [
        _text(NAMES - 10, middle + 4, each.name, "end"),
        _band(scale, drawn.figure.partly, y, PARTLY),
        _band(scale, drawn.figure.reproduced or (inf, -inf), y, NEAR),
        f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{at:.1f}" cy="{middle}" r="4" fill="{colour}"/>',
        _text(NAMES + PANEL + 14, middle + 4, each.shown, colour=colour),
    ]


def _band(scale: Scale, bounds: Bounds, y: int, colour: str) -> str:
    if bounds[0] > bounds[1]:
        return ""
    left, right = (NAMES + PANEL * scale.part(value) for value in bounds)
    wide = max(1.0, right - left)
    return f'<rect x="{left:.1f}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 6}" fill="{colour}"/>'


def _framed(parts: list[str], high: int) -> str:
    wide = NAMES + PANEL + TEXT
    legend = [
        _text(10, 24, "Dots: here, medians; lines: over seeds"),
        _text(10, 42, "Green: reproduced; yellow: partly"),
        _text(10, 60, "Blue dots: by construction", colour=COLOURS["by construction"]),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="11">'
    )
    paper = f'<rect width="{wide}" height="{high}" fill="white"/>'
    return "\n".join([head, paper, *legend, *(part for part in parts if part), "</svg>", ""])


def _text(
    x: float, y: float, text: str, anchor: str = "start", bold: bool = False, colour: str = "#222"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
    )


def _published(near: Bounds) -> float:
    """The middle of what is reproduced; of *at most so much* its end."""
    return sum(near) / 2 if near[0] > 0 else near[1]


def _divided(bounds: Bounds, by: float) -> Bounds:
    return bounds[0] / by, bounds[1] / by
