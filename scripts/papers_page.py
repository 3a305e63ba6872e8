"""Writes docs/papers.md from the newest record of `paceline bench papers` in benchmarks/.

    paceline bench papers --record && .venv/bin/python scripts/papers_page.py

Nothing in the page is written by hand but its opening.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec

from paceline.bench.harness.record import BenchRecord, BenchRow

ROOT = Path(__file__).resolve().parent.parent
PAGE, RECORDS = ROOT / "docs" / "papers.md", ROOT / "benchmarks"
OPENING = """# The papers' claims, tried here

Made by `scripts/papers_page.py` from [{record}](../benchmarks/{record}), not written by hand.
`paceline bench papers` tries all of them again, and with the name of a recipe behind it one of them. The rule
of each verdict stood in its recipe before it ran (`src/paceline/bench/papers/`). What is simulated, predicted
or computed by a formula is called so. Accuracy is that of small models with real gradients: it shows whether
an effect exists and where it comes from, not how large it is for the published models. Differences of
accuracies are in points of a hundred. What is not tried is in the last table, with what it would take.

- command: `{command}`
- machine: {cpu}, {cores} cores; load before the run {load:.1f}; {date}
- verdicts: {verdicts}
"""


def newest() -> Path:
    """The last record of the benchmark: by date, then by number."""

    def order(path: Path) -> tuple[str, int]:
        date, number = re.fullmatch(r"(\d+-\d+-\d+)-papers(?:-(\d+))?", path.stem).groups()  # type: ignore[union-attr]
        return date, int(number or 1)

    return max(RECORDS.glob("*-papers*.json"), key=order)


def page(path: Path) -> str:
    """The whole page from one record."""
    record = msgspec.json.decode(path.read_bytes(), type=BenchRecord)
    tried = [row for row in record.rows if row.value is not None]
    untried = [row for row in record.rows if row.value is None]
    verdicts = Counter(row.notes["verdict"] for row in tried if row.notes)
    verdicts["cannot be judged here"] += len(untried)
    machine = record.machine
    opening = OPENING.format(
        record=path.with_suffix(".md").name,
        command=record.command,
        cpu=machine.cpu,
        cores=machine.cores,
        load=machine.load,
        date=record.date,
        verdicts=", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
    )
    sections = [section(row, tried) for row in tried if row.notes]
    return "\n".join([opening, *sections, *_untried(untried), ""])


def section(first: BenchRow, rows: list[BenchRow]) -> str:
    """One recipe."""
    name, notes = str(first.case["recipe"]), first.notes
    lines = [f"## {name}: {notes['verdict']}", "", f"{first.case['paper']}. {notes[name]}", ""]
    lines += ["| figure | published | here | over seeds | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        if row.case["recipe"] == name:
            cells = ("claimed", "published", "", "over seeds", "verdict")
            shown = [str(row.case.get(cell, "")) if cell else row.shown for cell in cells]
            lines.append(f"| {' | '.join(shown)} |")
    lines += ["", f"*{first.case['how']}.* {notes['set-up']} Published: {notes['source']}.", ""]
    return "\n".join([*lines, f"Rule: {notes['rule']}.", "", notes["explained"], ""])


def _untried(rows: list[BenchRow]) -> list[str]:
    head = [
        "## Cannot be judged here yet",
        "",
        "| recipe | paper | claim | published | why, and what it takes |",
    ]
    lines = [
        f"| `{row.case['recipe']}` | {row.case['paper']} | {row.case['claimed']} | {row.case['published']} "
        f"| {row.remark} |"
        for row in rows
    ]
    return [*head, "|---|---|---|---|---|", *lines]


if __name__ == "__main__":
    PAGE.write_text(page(newest()))
    print(f"wrote {PAGE.relative_to(ROOT)} from {newest().relative_to(ROOT)}")
