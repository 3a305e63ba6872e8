"""A plot of a benchmark: horizontal bars in panels side by side, as SVG; one definition for all."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import msgspec

ROW, BAR, PANEL, NAMES, HEAD, GAP, ROOM = 20, 13, 230, 170, 46, 24, 66
OURS, THEIRS = "#0b6e4f", "#8a8f98"


class Panel(msgspec.Struct, frozen=True):
    """One figure, for every row of the plot."""

    title: str
    values: Sequence[float | None]
    """None: there is none, and `missing` says why."""
    missing: Sequence[str]
    digits: int = 1


def bars(names: Sequence[str], ours: Sequence[bool], panels: Sequence[Panel]) -> str:
    """The picture."""
    wide = NAMES + len(panels) * (PANEL + GAP)
    high = HEAD + ROW * len(names) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        *(_text(NAMES - 8, _y(row), name, "end") for row, name in enumerate(names)),
    ]
    for number, panel in enumerate(panels):
        parts += _panel(NAMES + number * (PANEL + GAP), panel, ours)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, panel: Panel, ours: Sequence[bool]) -> list[str]:
    longest = max((value for value in panel.values if value is not None), default=0.0) or 1.0
    parts = [_text(left, HEAD - 18, panel.title, "start", bold=True)]
    for row, value in enumerate(panel.values):
        if value is None:
            parts.append(_text(left, _y(row), panel.missing[row], "start"))
            continue
        long = (PANEL - ROOM) * value / longest
        top = HEAD + ROW * row + (ROW - BAR) / 2
        colour = OURS if ours[row] else THEIRS
        parts.append(f'<rect x="{left}" y="{top}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>')
        parts.append(_text(left + long + 4, _y(row), f"{value:,.{panel.digits}f}", "start"))
    return parts


def _y(row: int) -> float:
    return HEAD + ROW * row + ROW / 2 + 4


def _text(x: float, y: float, text: str, anchor: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
