"""Writes docs/papers.md and its picture from the records in benchmarks/ and the list of recipes.

    paceline bench papers --record && .venv/bin/python scripts/papers_page.py

Every recipe is shown as the record has it, if its set-up is still the recipe's, and judged by the rule that
it has now; the record keeps of every recipe its newest run. What another benchmark tries is shown from that
one's record. Nothing in the page is written by hand but its opening.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from paceline_bench.harness.record import BenchRecord, BenchRow, BenchRun, EarlierRun, read_record
from paceline_bench.papers.papers import OPEN, TRIED, judged_again
from paceline_bench.papers.plot import picture
from paceline_bench.papers.recipe import Figure, Open, Recipe, worst
from paceline_bench.strategies.told.findings import findings_of

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE, RECORDS = ROOT / "docs" / "papers.md", ROOT / "docs" / "papers.svg", ROOT / "benchmarks"
OPENING = """# The papers' claims, tried here

Made by `scripts/papers_page.py` from the records of `paceline bench papers`, not written by hand. The command
tries all of them again, and with the name of a recipe behind it one of them. The rule of each verdict stands
in its recipe (`bench/paceline_bench/papers/`), and is the same for all recipes with a figure of that kind.
The rules were made stricter on 2026-11-20, when most results were known: bands were put on gains instead of
ratios, the best of a sweep got an upper end, and what is computed stopped counting as reproduced. No verdict
got better by it. Where a set-up was changed after a result, the explanation says so.

A figure is *trained*, *measured*, *simulated* (by a simulator, like the published one) or *computed*: by a
formula, by a planner or from simulated times, with inputs that were chosen. Accuracy is that of small models
with real gradients: it shows whether an effect exists and where it comes from, not how large it is for the
published models. Differences of accuracies are in points of a hundred. Of a ratio of times to an accuracy,
0.00x means that the second side never reached it, *never* that the first did not: then there is no figure,
and a rule with an upper end does not call it reproduced. What is not tried is in the last table, with what it
would take.

Verdicts: {verdicts}.

![every judged figure beside the bands of its rule](papers.svg)

## All at a glance

By paper. Of a claim with several figures the one is shown that decides its verdict: the first of those that
went worst, of those that were trained or measured if there are any. Ours is the median over seeds.
*Reproduced*: within the tolerance of its rule; *partly*: the right direction, another size; *not*: neither.
*By construction*: the figure follows from a formula and from inputs that we chose, so that it says nothing
for the claim.

{summary}

## Where it comes from

{records}
"""

MISSING_TITLE, OPEN_TITLE = "Written and not run yet", "Cannot be judged here yet"
Found = dict[str, list[BenchRow]]
"""By recipe."""


def read(benchmark: str = "papers") -> BenchRecord:
    """The record of a benchmark."""
    return read_record(RECORDS / f"{benchmark}.json")


def found(record: BenchRecord) -> Found:
    """Each recipe that the record has as it is now, judged by today's rule."""
    parts = {name: [row for row in rows if row.tried] for name, rows in record.parts().items()}
    return {
        name: judged_again(recipe, rows)
        for name, recipe in TRIED.items()
        if (rows := parts.get(name)) and fits(recipe, rows)
    }


def fits(recipe: Recipe, rows: list[BenchRow]) -> bool:
    """Whether what was recorded is what the recipe would try now: the set-up is the same, and no figure is
    missing."""
    names = {row.case["claimed"] for row in rows}
    return rows[0].notes["set-up"] == recipe.setup and all(each.name in names for each in recipe.figures)


class Elsewhere(NamedTuple):
    """A claim that another benchmark tries."""

    claim: Open
    record: BenchRecord
    """That benchmark's,"""
    findings: list[BenchRow]
    """its findings,"""
    values: dict[str, float]
    """or the values of the claim's figures."""

    @property
    def verdict(self) -> str:
        """That of the worst figure; or by the findings that are in their published range: all, some, none."""
        if self.claim.figures:
            values = {name: [value] for name, value in self.values.items()}
            return worst(self.claim.figures, values, "measured")
        inside = [row.case["published range"] == "in" for row in self.findings]
        return "reproduced" if all(inside) else "partly" if any(inside) else "not"

    @property
    def counted(self) -> str:
        """How many findings are in their range."""
        inside = sum(row.case["published range"] == "in" for row in self.findings)
        return f"{inside} of {len(self.findings)} findings in the published range"

    def verdict_of(self, figure: Figure) -> str:
        """Of one."""
        return figure.verdict(self.values[figure.name], "measured")


def elsewhere() -> dict[str, Elsewhere]:
    """By name."""
    return {name: _found_elsewhere(claim) for name, claim in OPEN.items() if claim.benchmark}


def _found_elsewhere(claim: Open) -> Elsewhere:
    record = read(claim.benchmark)
    values = {} if claim.values is None else claim.values(record.rows)
    if claim.values is not None and not values:
        raise LookupError(f"the record of `bench {claim.benchmark}` lacks what {claim.name} needs")
    return Elsewhere(claim, record, findings_of(record.rows), values)


def page() -> str:
    """The whole page."""
    record, others = read(), elsewhere()
    tried = found(record)
    verdicts = Counter(rows[0].notes["verdict"] for rows in tried.values())
    verdicts += Counter(other.verdict for other in others.values())
    verdicts["not tried"] = len(OPEN) - len(others) + len(TRIED) - len(tried)
    opening = OPENING.format(
        verdicts=", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())),
        summary="\n".join(summary(tried, others)),
        records="\n".join(_origins(record, others)),
    )
    sections = [section(name, record.run_of(name), tried[name]) for name in TRIED if name in tried]
    sections += [section_elsewhere(name, other) for name, other in others.items()]
    return "\n".join([opening, *sections, *_missing(tried), *_open(), ""])


def drawn() -> str:
    """The picture of what the page shows."""
    return picture([row for rows in found(read()).values() for row in rows], TRIED)


def _origins(record: BenchRecord, others: dict[str, Elsewhere]) -> list[str]:
    """All runs from which something is shown."""
    runs = [told(record.name, record), *(told(record.name, run) for run in record.earlier)]
    return [*runs, *dict.fromkeys(told(other.record.name, other.record) for other in others.values())]


def summary(tried: Found, others: dict[str, Elsewhere]) -> list[str]:
    """A table with a line for every claim, those of one paper together."""
    lines = [(recipe.paper, _line(name, tried)) for name, recipe in TRIED.items()]
    lines += [(other.claim.paper, _line_elsewhere(name, other)) for name, other in others.items()]
    lines += [
        (
            claim.paper,
            f"{claim.paper} | {claim.claim} | | | | | [cannot be judged here]({_anchor(OPEN_TITLE)})",
        )
        for name, claim in OPEN.items()
        if name not in others
    ]
    papers = list(dict.fromkeys(paper for paper, _ in lines))
    ordered = sorted(lines, key=lambda line: papers.index(line[0]))
    head = ["| paper | claim | figure | published | ours | how | verdict |", "|---|---|---|---|---|---|---|"]
    return [*head, *(f"| {line} |" for _, line in ordered)]


def _line(name: str, tried: Found) -> str:
    recipe = TRIED[name]
    if name not in tried:
        return f"{recipe.paper} | {recipe.claim} | | | | | [not run yet]({_anchor(MISSING_TITLE)})"
    rows = tried[name]
    verdict, row = rows[0].notes["verdict"], deciding(rows)
    figure, published = row.case["claimed"], row.case["published"]
    link = f"[{verdict}]({_anchor(f'{name}: {verdict}')})"
    return (
        f"{recipe.paper} | {recipe.claim} | {figure} | {published} | {said(row)} | {recipe.evidence} | {link}"
    )


def _line_elsewhere(name: str, other: Elsewhere) -> str:
    link = f"[{other.verdict}]({_anchor(f'{name}: {other.verdict}')})"
    figures = [each for each in other.claim.figures if other.verdict_of(each) == other.verdict]
    seen = f"{other.counted} | |"
    if figures:
        seen = f"{figures[0].name} | {figures[0].published} | {_measured(other, figures[0])}"
    return f"{other.claim.paper} | {other.claim.claim} | {seen} | measured | {link}"


def _measured(other: Elsewhere, figure: Figure) -> str:
    value = other.values[figure.name]
    return ", ".join(filter(None, (f"{value:.2f}x", figure.remark(value))))


def deciding(rows: list[BenchRow]) -> BenchRow:
    """The figure to which a recipe owes its verdict."""
    return next(row for row in rows if row.case["verdict"] == rows[0].notes["verdict"])


def said(row: BenchRow) -> str:
    """A figure, and what has to be said beside it; or why there is none."""
    return ", ".join(filter(None, (row.shown, row.remark)))


def _anchor(title: str) -> str:
    """As GitHub makes it of a heading."""
    return "#" + re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")


def told(name: str, run: BenchRun) -> str:
    """A run, and the record that shows it."""
    machine = run.machine
    parts = f"; {', '.join(run.parts)} alone" if isinstance(run, EarlierRun) else ""
    return (
        f"- [{name}](../benchmarks/{name}.md), {run.date}: `{run.command}`; {machine.cpu}, "
        f"{machine.cores} cores, load before the run {machine.load:.1f}{parts}"
    )


def section(name: str, run: BenchRun, rows: list[BenchRow]) -> str:
    """One recipe. Explanations are today's, and of the digits: what was recorded without has none."""
    first, notes, recipe = rows[0], rows[0].notes, TRIED[name]
    lines = [f"## {name}: {notes['verdict']}", "", f"{recipe.paper}. {recipe.claim}", ""]
    lines += ["| figure | published | here | over seeds | verdict |", "|---|---|---|---|---|"]
    for row in rows:
        cells = ("claimed", "published", "", "over seeds", "verdict")
        shown = [str(row.case.get(cell, "")) if cell else said(row) for cell in cells]
        lines.append(f"| {' | '.join(shown)} |")
    how = str(first.case["how"])
    if not how.startswith(recipe.evidence):
        how = f"{recipe.evidence}; {how}"
    lines += ["", f"*{how}.* {notes['set-up']} Published: {notes['source']}.", ""]
    lines += [f"Rule: {notes['rule']}.", ""]
    if "explained" in notes:
        lines += [recipe.explained, ""]
    return "\n".join([*lines, f"Run of {run.date}.", ""])


def section_elsewhere(name: str, other: Elsewhere) -> str:
    """What another benchmark found."""
    claim = other.claim
    lines = [
        f"## {name}: {other.verdict}",
        "",
        f"{claim.paper}. {claim.claim[0].upper()}{claim.claim[1:]}.",
        "",
    ]
    lines += _figures_elsewhere(other) if claim.figures else _findings_elsewhere(other)
    lines += ["", f"*Measured in real processes, by {claim.takes}.* Published: {claim.source}.", ""]
    rule = "reproduced if all findings are in their range, partly if some are, not if none is"
    if claim.figures:
        rule = "; ".join(figure.rule("measured") for figure in claim.figures)
    lines += [f"Rule: {rule}.", ""]
    return "\n".join(
        [*lines, f"{claim.reason[0].upper()}{claim.reason[1:]}.", "", f"Run of {other.record.date}.", ""]
    )


def _figures_elsewhere(other: Elsewhere) -> list[str]:
    lines = ["| figure | published | here | verdict |", "|---|---|---|---|"]
    return lines + [
        f"| {each.name} | {each.published} | {_measured(other, each)} | {other.verdict_of(each)} |"
        for each in other.claim.figures
    ]


def _findings_elsewhere(other: Elsewhere) -> list[str]:
    keys = ("finding", "published", "ours", "published range")
    lines = ["| finding | published | here | published range |", "|---|---|---|---|"]
    return lines + [f"| {' | '.join(str(row.case[key]) for key in keys)} |" for row in other.findings]


def _missing(tried: Found) -> list[str]:
    """Recipes that are written and were not run, or not as they are now."""
    missing = [recipe for name, recipe in TRIED.items() if name not in tried]
    head = [f"## {MISSING_TITLE}", "", "| recipe | paper | claim | set-up |", "|---|---|---|---|"]
    lines = [f"| `{each.name}` | {each.paper} | {each.claim} | {each.setup} |" for each in missing]
    return [*head, *lines, ""] if missing else []


def _open() -> list[str]:
    head = [
        f"## {OPEN_TITLE}",
        "",
        "| claim | paper | published | why, and what it takes |",
        "|---|---|---|---|",
    ]
    lines = [
        f"| `{name}`: {claim.claim} | {claim.paper} | {claim.source} | {claim.reason}. It would take: "
        f"{claim.takes}. |"
        for name, claim in OPEN.items()
        if not claim.benchmark
    ]
    return [*head, *lines]


if __name__ == "__main__":
    PAGE.write_text(page())
    PICTURE.write_text(drawn())
    print(f"wrote {PAGE.relative_to(ROOT)} and {PICTURE.name}")
