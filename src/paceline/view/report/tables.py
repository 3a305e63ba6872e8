"""The parts of the report that are words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from paceline.trace import Result
from paceline.trace.events import Note, WorkerLeft
from paceline.view import figures
from paceline.view.compare import compare, speedups
from paceline.view.report.charts import Look
from paceline.view.report.markup import Markup, element, join
from paceline.view.report.page import figure, paragraph, swatch
from paceline.view.report.record import RunRecord

ENTRIES_SHOWN = 60


def headlines(results: Sequence[Result], seen: Sequence[Look]) -> Markup:
    """What a reader should take away, when several runs make it a matter of comparison."""
    cards = [_quickest(results, seen), _busiest(results, seen), _best(results, seen)]
    found = [card for card in cards if card is not None] if len(results) > 1 else []
    return element("div", *found, class_="cards") if found else Markup("")


def _quickest(results: Sequence[Result], seen: Sequence[Look]) -> Markup | None:
    gains = speedups(results)
    timed = [(r.time_to_target_s, at) for at, r in enumerate(results) if r.time_to_target_s is not None]
    if not timed or len({result.target for result in results}) > 1:
        return None
    took, at = min(timed)
    gain = gains[at]
    over = f", {gain.factor:.2f}× bsp" if gain and gain.by == "target" and gain.factor != 1 else ""
    goal = figures.threshold(results[at].target or 0.0)
    return _card(seen[at], f"first to {goal}", f"after {figures.seconds(took)}{over}")


def _busiest(results: Sequence[Result], seen: Sequence[Look]) -> Markup | None:
    shares = [[share for share in result.waiting_share if share is not None] for result in results]
    means = [(sum(known) / len(known), at) for at, known in enumerate(shares) if known]
    if not means or figures.percent(min(means)[0]) == figures.percent(max(means)[0]):
        return None
    (least, at), (most, worst) = min(means), max(means)
    most_text = (
        f"{figures.percent(least)} of its workers' time; most: {seen[worst].short}, {figures.percent(most)}"
    )
    return _card(seen[at], "waits least", most_text)


def _best(results: Sequence[Result], seen: Sequence[Look]) -> Markup | None:
    known = [
        (r.accuracy, -at) for at, r in enumerate(results) if r.accuracy is not None and isfinite(r.accuracy)
    ]
    if not known or figures.accuracy(max(known)[0]) == figures.accuracy(min(known)[0]):
        return None
    (best, at), (worst, _) = max(known), min(known)
    alike = [seen[-i].short for value, i in known if figures.accuracy(value) == figures.accuracy(best)]
    others = ", ".join(name for name in alike if name != seen[-at].short)
    tie = f", as {others}" if others else ""
    when = figures.moment(results[-at], results[-at].accuracy_at) or " at its end"
    spread = f"{figures.accuracy(best)}{when}{tie}; lowest: {figures.accuracy(worst)}"
    return _card(seen[-at], "ends most accurate", spread)


def _card(look: Look, what: str, detail: str) -> Markup:
    name = element("b", look.short)
    return element("div", element("span", what), name, element("span", detail), class_=f"card {look.css}")


def comparison_table(results: Sequence[Result], seen: Sequence[Look]) -> Markup:
    """The table the terminal shows, with the waiting drawn as well."""
    content = compare(results)
    head = element("tr", *(element("th", heading, scope="col") for heading in content.headings))
    rows = []
    for result, row, look in zip(results, content.rows, seen, strict=True):
        first = element("th", swatch(look.swatch, row.label), scope="row")
        cells = [_cell(value) for value in row[1:]]
        cells[row._fields.index("waiting") - 1] = element("td", row.waiting, _shares(result.waiting_share))
        rows.append(element("tr", first, *cells))
    table = element("table", element("thead", head), element("tbody", *rows))
    return join([element("div", table, class_="scroll"), paragraph(content.caption)])


def _cell(value: str) -> Markup:
    return element("td", value, class_="dash" if value == figures.DASH else None)


def _shares(shares: Sequence[float | None]) -> Markup:
    """A small bar per worker: the eye finds the odd one out faster than in figures."""
    if len(shares) > figures.MANY_WORKERS or all(share is None for share in shares):
        return Markup("")
    bars = [
        element("i", style=f"height:{0 if share is None else max(3, round(100 * share))}%")
        for share in shares
    ]
    return element("span", *bars, class_="shares", aria_hidden="true")


def facts_table(pairs: Sequence[tuple[RunRecord, Look]]) -> Markup:
    """Everything that was set, injected or counted, run by run."""
    columns = [_facts(record) for record, _ in pairs]
    names = [swatch(look.swatch, look.short) for _, look in pairs]
    head = element("tr", element("th", ""), *(element("th", name, scope="col") for name in names))
    rows = [
        element("tr", element("th", fact, scope="row"), *(_cell(column[fact]) for column in columns))
        for fact in columns[0]
    ]
    table = element("table", element("thead", head), element("tbody", *rows), class_="facts")
    return element("div", table, class_="scroll")


def _facts(record: RunRecord) -> dict[str, str]:
    start, result, model, known = record.start, record.result, record.model, figures.known
    emulated = figures.emulation(start.emulated or {}) or "nothing"
    return {
        "run": start.run,
        "protocol": start.protocol,
        "settings": figures.settings(start.settings) or "none",
        "workers": figures.count(start.workers),
        "batches": "balanced: in proportion to each worker's speed" if start.balance else "alike",
        "stale gradients": "left as they are" if start.correct == "none" else f"corrected by {start.correct}",
        "compression": start.compress,
        "fabric": {"shared": "shared memory", None: "none"}.get(start.fabric) or str(start.fabric),
        "clock": f"virtual, on a simulated cluster ({emulated})" if start.simulated else "real",
        "emulated": "nothing" if start.simulated else emulated,
        "status": result.status,
        "script": start.script or figures.DASH,
        "started": figures.date(start.started_at),
        "seed": str(start.seed),
        "length": figures.seconds(result.seconds),
        "samples": figures.done_of(result.samples, result.samples_due),
        "iterations": known(result.iterations, figures.count),
        "updates": figures.count(result.updates),
        "final loss": known(result.loss, figures.number),
        "parameters": known(model.parameters if model else None, figures.count),
        "sent": known(result.bytes_sent, figures.size),
        "received": known(result.bytes_received, figures.size),
    }


def happened(pairs: Sequence[tuple[RunRecord, Look]]) -> list[Markup]:
    """Who was lost and what was noted, in the order of time."""
    parts = []
    for record, look in pairs:
        entries: list[WorkerLeft | Note] = sorted([*record.lost, *record.notes], key=lambda entry: entry.t)
        if entries:
            unshown = len(record.lost) + record.notes_seen - min(len(entries), ENTRIES_SHOWN)
            caption = f"The trace has {unshown:,} more." if unshown else ""
            listed = element("ul", *map(_entry, entries[:ENTRIES_SHOWN]), class_="happened")
            parts.append(figure(listed, swatch(look.swatch, look.name), caption))
    return (
        [element("div", *parts, class_="stack")]
        if parts
        else [paragraph("No worker was lost, and there are no notes.")]
    )


def _entry(entry: WorkerLeft | Note) -> Markup:
    if isinstance(entry, Note):
        text, loud = entry.text, entry.level == "error"
        text = text if entry.level == "info" else f"{entry.level}: {text}"
    else:
        again = f" ({figures.plural(entry.unfinished, 'sample')} dispensed again)" if entry.unfinished else ""
        detail = f": {entry.detail}" if entry.detail else ""
        text, loud = f"rank {entry.worker} {entry.reason}{detail}{again}", True
    when = element("time", figures.seconds(entry.t))
    return element("li", when, element("span", text, class_="error" if loud else None))


_READING = {
    "protocol": "The rule that keeps workers in step, and its settings.",
    "to target": (
        "Seconds until an evaluation first reached the target accuracy. This is the figure to compare: "
        "more samples per second help only if each sample still improves the model as much."
    ),
    "balance": "Every worker's batch was in proportion to its measured speed; each change of sizes is noted.",
    "waiting": "The share of a worker's time in which it had pushed a gradient and was held back for others.",
    "staleness": "Optimizer steps made between reading the weights and pushing the gradient computed on "
    "them. Older gradients can slow learning down.",
    "gap": "The largest number of iterations by which a worker started ahead of the slowest.",
    "timeline": (
        "Each row is a worker. A slow worker has long quiet bars; workers that wait for it have bright "
        "ones. Blank is time outside training steps. A cross marks a lost worker."
    ),
    "bytes sent": (
        "Bytes of pushes or averages, after compression, counted as if they were sent; on one host memory "
        "is shared and nothing is sent. A vector counts once, however many workers receive it."
    ),
    "throughput": "Samples are spread evenly over the iteration that processed them.",
    "emulated": "Slowness or device time was emulated: compare these runs only with each other.",
    "simulated": "Times are virtual: the cluster model computed them, no clock measured them.",
    figures.DASH: "Unknown; this is never a zero.",
}


def reading() -> Markup:
    """What the words and pictures mean."""
    return element(
        "dl", *(join([element("dt", word), element("dd", text)]) for word, text in _READING.items())
    )
