"""Pictures of the tables of the benchmark of strategies: bars, as SVG files that need nothing else."""

from __future__ import annotations

from html import escape

from paceline_bench.harness.record import BenchRow
from paceline_bench.strategies.told.tables import T1, T2, T4

WIDTH, LEFT, BAR, GAP = 760, 190, 15, 26
COLOURS = ("#2563c9", "#0b8a68", "#cf4f12", "#9a3bb0", "#087e96", "#c22a63", "#6f7a10", "#8a5a2b", "#5b6472")
STYLE = "text{font:12px sans-serif;fill:#222}.cell{font-weight:bold}rect.paper{fill:#fff}"
TITLES = {
    "speed": (T1, "Speed-up over one worker"),
    "memory": (T2, "Peak memory over DDP's"),
    "links": (T4, "Share of the native speed on a throttled link"),
}


def plots(rows: list[BenchRow]) -> dict[str, str]:
    """One picture for each table that has figures."""
    made = {
        name: bars(title, [row for row in rows if row.table == table])
        for name, (table, title) in TITLES.items()
    }
    return {name: picture for name, picture in made.items() if picture}


def bars(title: str, rows: list[BenchRow]) -> str:
    """Bars of all strategies, cell by cell; nothing where there are no figures."""
    shown = [row for row in rows if row.value is not None]
    if not shown:
        return ""
    most = max(row.value or 0.0 for row in shown) or 1.0
    names = list(dict.fromkeys(str(row.case["strategy"]) for row in shown))
    parts, y, cell = [f'<text x="10" y="20" class="cell">{escape(title)}</text>'], 34.0, ""
    for row in shown:
        if _cell(row) != cell:
            cell = _cell(row)
            parts.append(f'<text x="10" y="{y + GAP - 10:.0f}" class="cell">{escape(cell)}</text>')
            y += GAP
        parts.append(_bar(row, y, most, COLOURS[names.index(str(row.case["strategy"])) % len(COLOURS)]))
        y += BAR + 3
    box = f'viewBox="0 0 {WIDTH} {y + 10:.0f}"'
    paper = '<rect class="paper" width="100%" height="100%"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(title)}">'
    return f"{head}<style>{STYLE}</style>{paper}{''.join(parts)}</svg>"


def _cell(row: BenchRow) -> str:
    keys = ("model", "workers", "device", "link", "straggler")
    return ", ".join(str(row.case[key]) for key in keys if key in row.case)


def _bar(row: BenchRow, y: float, most: float, colour: str) -> str:
    value = row.value or 0.0
    long = (WIDTH - LEFT - 70) * value / most
    name = (
        f'<text x="{LEFT - 8}" y="{y + 12:.0f}" text-anchor="end">{escape(str(row.case["strategy"]))}</text>'
    )
    bar = f'<rect x="{LEFT}" y="{y:.0f}" width="{long:.1f}" height="{BAR}" fill="{colour}"/>'
    return f'{name}{bar}<text x="{LEFT + long + 6:.1f}" y="{y + 12:.0f}">{value:.2f}</text>'
