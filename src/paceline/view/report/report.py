"""One HTML file about one or several runs: self-contained, so that it can be mailed, kept and printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from paceline.errors import ConfigError
from paceline.trace import Result
from paceline.view import figures
from paceline.view.compare import labels
from paceline.view.palette import STATES
from paceline.view.report.charts import Curve, Look, Measure, histogram, line_chart, looks
from paceline.view.report.gantt import ROWS_SHOWN, Window, timeline, windows
from paceline.view.report.lookups import lookup_sections
from paceline.view.report.markup import Markup, element
from paceline.view.report.page import document, figure, paragraph, section, swatch
from paceline.view.report.record import RunRecord, read_record
from paceline.view.report.tables import comparison_table, facts_table, happened, headlines, reading
from paceline.view.report.traffic import traffic

NO_DECISIONS = "The trace is summarised: it has no single decisions, so there is no timeline."


@dataclass
class Content:
    """The runs of a report and how each appears in it."""

    records: list[RunRecord]

    @cached_property
    def results(self) -> list[Result]:
        """What each run came to."""
        return [record.result for record in self.records]

    @cached_property
    def looks(self) -> list[Look]:
        """How each run appears."""
        return looks(self.results, labels(self.results))

    @cached_property
    def until_s(self) -> float:
        """When the last run ended."""
        return max(result.seconds for result in self.results)

    def pairs(self) -> list[tuple[RunRecord, Look]]:
        """Every run with its look."""
        return list(zip(self.records, self.looks, strict=True))


def write_report(runs: list[Path], out: Path) -> Path:
    """Write the report of some run folders to `out` (a file, or a folder for `report.html`)."""
    if not runs:
        raise ConfigError("a report needs at least one run. Give a run folder, such as runs/latest.")
    page = render_report([read_record(run) for run in runs])
    path = out / "report.html" if out.is_dir() else out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="replace")
    return path


def render_report(records: list[RunRecord]) -> str:
    """The report as text."""
    content = Content(records)
    title = _title(content.results)
    return document(
        title,
        _header(title, content),
        headlines(content.results, content.looks),
        section(
            "Comparison" if len(records) > 1 else "Result", comparison_table(content.results, content.looks)
        ),
        section("Learning", *_learning(content)),
        section("Who waits for whom", *_timelines(content)),
        section("How old gradients were", *_staleness(content)),
        section("Throughput", *_throughput(content)),
        section("Bytes sent", *traffic(list(zip(content.results, content.looks, strict=True)))),
        *lookup_sections(list(zip(content.results, content.looks, strict=True))),
        section("Failures and notes", *happened(content.pairs())),
        section("Settings and circumstances", facts_table(content.pairs())),
        section("How to read this", reading()),
    )


def _title(results: Sequence[Result]) -> str:
    first = results[0]
    workers = {result.workers for result in results}
    on = f" on {figures.plural(first.workers, 'worker')}" if len(workers) == 1 else ""
    if len(results) == 1:
        return f"{figures.title(first, first.settings)}{on}"
    names = list(dict.fromkeys(figures.title(r, {}) for r in results))
    if len(names) == 1:
        return f"{len(results)} runs of {names[0]}{on}"
    return f"{', '.join(names[:-1])} and {names[-1]}{on}"


def _header(title: str, content: Content) -> Markup:
    scripts = sorted({record.start.script for record in content.records if record.start.script})
    started = sorted({record.start.started_at for record in content.records} - {""})
    tags = [element("span", text, class_="tag") for text in (*scripts[:4], *map(figures.date, started[:1]))]
    tags += [element("span", text, class_="tag loud") for text in figures.kinds(content.results)]
    kicker = element("p", "Paceline report", class_="kicker")
    return element("header", kicker, element("h1", title), element("div", *tags))


def _legend(content: Content) -> Markup:
    if len(content.looks) == 1:
        return Markup("")
    entries = []
    for look in content.looks:
        words = swatch(look.swatch, look.name)
        entries.append(element("button", words, type="button", data_run=look.run, aria_pressed="true"))
    return element("div", *entries, class_="legend")


def _learning(content: Content) -> list[Markup]:
    loss, accuracy = _loss_chart(content), _accuracy_chart(content)
    charts = [chart for chart in (loss, accuracy, _apart_chart(content)) if chart is not None]
    parts = [_legend(content), element("div", *charts, class_="pair")] if charts else []
    missing = [name for name, chart in (("loss", loss), ("accuracy", accuracy)) if chart is None]
    parts += [paragraph(f"No {name} was reported, so its chart is left out.", "absent") for name in missing]
    return parts


def _loss_chart(content: Content) -> Markup | None:
    measured = [Curve(look, points) for r, look in content.pairs() if (points := r.evaluated("loss"))]
    training = [
        Curve(look, points, faint=bool(measured))
        for record, look in content.pairs()
        if (points := record.training_loss.means())
    ]
    if not measured and not training:
        return None
    caption = {
        (True, True): "Evaluated, and in the background as reported while training.",
        (True, False): "Evaluated on a snapshot.",
        (False, True): "As the workers reported it while training.",
    }[bool(measured), bool(training)]
    gone = [look.short for record, look in content.pairs() if record.diverged]
    if gone:
        caption += f" Diverged, so not all of it can be drawn: {', '.join(gone)}."
    chart = line_chart([*measured, *training], Measure("loss"), content.until_s)
    return figure(chart, Markup("Loss over time"), caption)


def _accuracy_chart(content: Content) -> Markup | None:
    curves = [_accuracy_curve(*pair) for pair in content.pairs() if pair[0].evaluated("accuracy")]
    if not curves:
        return None
    targets = sorted({result.target for result in content.results if result.target is not None})
    marks = tuple((target, f"target {figures.threshold(target)}") for target in targets)
    shares = all(0 <= value <= 1 for curve in curves for _, value in curve.points)
    measure = Measure("accuracy", figures.percent if shares else None, figures.accuracy, marks)
    caption = "A ring marks where the target was first reached." if targets else "Evaluated on a snapshot."
    return figure(line_chart(curves, measure, content.until_s), Markup("Accuracy over time"), caption)


def _accuracy_curve(record: RunRecord, look: Look) -> Curve:
    points = record.evaluated("accuracy")
    reached = record.result.time_to_target_s
    ring = next((point for point in points if reached is not None and point[0] >= reached), None)
    return Curve(look, points, ring=ring)


def _apart_chart(content: Content) -> Markup | None:
    """How far apart the replicas of peers were; without peers there is nothing to show."""
    name = "consensus_distance"
    curves = [Curve(look, points) for record, look in content.pairs() if (points := record.evaluated(name))]
    if not curves:
        return None
    caption = "How far replicas were from their mean, as the root of the mean square, when evaluated."
    chart = line_chart(curves, Measure("distance from the mean"), content.until_s)
    return figure(chart, Markup("How far apart replicas were"), caption)


def _timelines(content: Content) -> list[Markup]:
    shown = list(zip(content.pairs(), windows(content.records), strict=True))
    if all(window is None for _, window in shown):
        return [paragraph(NO_DECISIONS, "absent")]
    states = [element("span", swatch(f"c-{state}", state)) for state in STATES]
    drawn = [_timeline(record, look, window) for (record, look), window in shown]
    return [element("div", *states, class_="legend"), element("div", *drawn, class_="stack")]


def _timeline(record: RunRecord, look: Look, window: Window | None) -> Markup:
    heading = swatch(look.swatch, look.name)
    if window is None:
        return figure(paragraph(NO_DECISIONS, "absent"), heading)
    begin, end = window
    shown, whole = figures.seconds(end - begin), figures.seconds(record.tally.now)
    caption = f"{shown} from the first iteration on, of {whole} in all."
    if end >= record.tally.now:
        caption = "The whole run."
    if len(record.spans) > ROWS_SHOWN:
        caption += f" The slowest and the fastest of {figures.plural(len(record.spans), 'worker')}."
    return figure(timeline(record, window), heading, caption, wide=True)


def _staleness(content: Content) -> list[Markup]:
    known = [(record.tally.staleness, look) for record, look in content.pairs() if record.tally.staleness]
    if not known:
        return [paragraph("No gradient was applied, so there is no staleness to show.", "absent")]
    highest = max(max(counts) for counts, _ in known)
    drawn = [
        figure(histogram(counts, look, highest), swatch(look.swatch, look.short)) for counts, look in known
    ]
    return [element("div", *drawn, class_="many")]


def _throughput(content: Content) -> list[Markup]:
    curves = [
        Curve(look, points)
        for record, look in content.pairs()
        if len(points := record.throughput.rates(record.tally.now)) > 1
    ]
    if not curves:
        return [paragraph("Too few samples were counted to show their rate over time.", "absent")]
    measure = Measure("samples per second", from_zero=True, wide=True, dots=False)
    chart = line_chart(curves, measure, content.until_s)
    return [_legend(content), figure(chart, wide=True)]
