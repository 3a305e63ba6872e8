"""The report's table of lookups in embedding tables: who was asked for how much, and who is slow."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.trace import Result
from paceline.view import figures
from paceline.view.report.charts import Look
from paceline.view.report.markup import Markup, element
from paceline.view.report.page import figure, section, swatch


def lookup_sections(runs: Sequence[tuple[Result, Look]]) -> list[Markup]:
    """One, if any of the runs has tables that are split over workers."""
    drawn = [_of_run(result, look) for result, look in runs if result.lookups is not None]
    return [section("Lookups in embedding tables", element("div", *drawn, class_="many"))] if drawn else []


def _of_run(result: Result, look: Look) -> Markup:
    told = result.lookups
    assert told is not None
    head = element("tr", *(element("th", name) for name in ("worker", "ids looked up", "ms for a batch")))
    rows = [
        element("tr", *(element("td", cell) for cell in (f"rank {rank}", figures.count(ids), f"{took:.3f}")))
        for rank, (ids, took) in enumerate(zip(told.ids, told.lookup_ms, strict=True))
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="facts")
    return figure(table, swatch(look.swatch, look.short), figures.lookups(told))
