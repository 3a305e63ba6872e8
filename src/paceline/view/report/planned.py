"""A report about sharding plans and their runs: what is done, what it should take, and what it took.

Takes plan files and folders of runs that carried a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import ConfigError
from paceline.plan.files import Plan, read_plan
from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.program import Instruction
from paceline.plan.hap.tables import name_of
from paceline.plan.osdp.plan import OsdpPlan, memory_curve
from paceline.plan.osdp.tables import mode_of, why_simplest
from paceline.plan.profile.files import read_table
from paceline.plan.profile.units import size_text, time_text
from paceline.view.palette import STATES
from paceline.view.report.markup import Markup, element
from paceline.view.report.page import document, figure, paragraph, section, swatch
from paceline.view.report.svg import drawing, label, titled

WIDTH, ROW, LEFT = 1140.0, 26.0, 120.0
HAIRLINE = 0.6
STEPS = ("compute", "exchange")


class PlannedRun(NamedTuple):
    """A plan, and what a run of it measured, if one did."""

    name: str
    plan: Plan
    result: dict[str, Any] | None


def is_planned(path: Path) -> bool:
    """Whether this is a plan file, or the folder of a run that carried one out."""
    return path.is_file() or (path / "plan.json").exists()


def read_planned(path: Path) -> PlannedRun:
    """A plan file or a run's folder."""
    if path.is_file():
        return PlannedRun(path.name, read_plan(path)[1], None)
    result = read_table(path / "result.json", "result") if (path / "result.json").exists() else None
    return PlannedRun(path.resolve().name, read_plan(path / "plan.json")[1], result)


def write_planned(paths: Sequence[Path], out: Path) -> Path:
    """Write the report of plans to `out` (a file, or a folder for `report.html`)."""
    for path in paths:
        if not is_planned(path):
            raise ConfigError(
                f"{path} is a run without a plan, and another one has a plan. Write two reports, one for "
                "each kind."
            )
    page = render_planned([read_planned(path) for path in paths])
    file = out / "report.html" if out.is_dir() else out
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8", errors="replace")
    return file


def render_planned(runs: Sequence[PlannedRun]) -> str:
    """The report as text."""
    title = ", ".join(f"{run.plan.planner.upper()} plan for {run.plan.model}" for run in runs)
    kicker = element("p", "Paceline report", class_="kicker")
    tags = [element("span", run.name, class_="tag") for run in runs]
    if any(run.result and run.result.get("emulated") for run in runs):
        tags.append(element("span", "emulated devices", class_="tag loud"))
    header = element("header", kicker, element("h1", title), element("div", *tags))
    return document(title, header, *(part for run in runs for part in _parts(run)))


def _parts(run: PlannedRun) -> list[Markup]:
    plan = run.plan
    told = plan.notes if isinstance(plan, HapPlan) else ()
    notes = [section("What is planned as one piece", *map(paragraph, told))] if told else []
    if isinstance(plan, HapPlan):
        drawn = [section("Program", _strip(plan), _instructions(plan)), section("Ratios", *_ratios(plan))]
    else:
        drawn = [section("Memory over the step", _curve(plan)), section("Operators", _operators(plan))]
    return [section(f"Predicted and measured: {run.name}", _outcome(run)), *notes, *drawn]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    head = element("tr", *(element("th", text, scope="col") for text in headings))
    body = [element("tr", *(element("td", text) for text in row)) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="scroll")


def _outcome(run: PlannedRun) -> Markup:
    """The plan, what was measured, and the simple alternatives, in one table."""
    plan, rows = run.plan, []
    told = plan.predicted
    rows.append(
        ["this plan", time_text(told.seconds), f"{told.samples_per_s:.1f}", size_text(told.memory_bytes)]
    )
    if run.result is not None:
        rows.append(["measured", *_measured(run.result, plan)])
    for name, row in plan.simple().items():
        fits = "" if row.fits else " (does not fit)"
        rows.append(
            [name + fits, time_text(row.seconds), f"{row.samples_per_s:.1f}", size_text(row.memory_bytes)]
        )
    table = _table(("", "step", "samples/s", "memory per device"), rows)
    said = why_simplest(plan) if isinstance(plan, OsdpPlan) else f"{plan.verdict()}."
    return element("div", table, *([paragraph(said)] if said else []))


def _measured(result: dict[str, Any], plan: Plan) -> list[str]:
    step = result["measured"]["step_s"]
    peaks = [size for size in result["measured"]["peak_bytes"] if size is not None]
    batch = plan.batch * (plan.workers if isinstance(plan, OsdpPlan) else 1)
    return [
        "-" if step is None else time_text(step),
        "-" if not step else f"{batch / step:.1f}",
        size_text(max(peaks)) if peaks else "-",
    ]


# -- HAP --------------------------------------------------------------------------------------


def _strip(plan: HapPlan) -> Markup:
    """Every instruction as long as it should take, computing above, moving bytes below."""
    total = plan.program.seconds or 1.0
    scale, at, parts = (WIDTH - LEFT) / total, 0.0, []
    for row, state in enumerate(STEPS):
        words = {"compute": "computing", "exchange": "moving bytes"}[state]
        parts.append(label(0, ROW * row + 18, words, "name"))
    for each in plan.program.instructions:
        for row, (state, seconds) in enumerate(zip(STEPS, (each.compute_s, each.comm_s), strict=True)):
            if seconds:
                x, width = LEFT + at * scale, max(seconds * scale, HAIRLINE)
                bar = element("rect", x=x, y=ROW * row + 4, width=width, height=ROW - 6, class_=state)
                parts.append(titled(_says(each, seconds), bar))
            at += seconds
    words = f"The program of {plan.model}: {len(plan.program.instructions)} instructions"
    chart = drawing(WIDTH, 2 * ROW + 4, words, *parts)
    legend = [element("span", swatch(f"c-{state}", state)) for state in STATES if state in STEPS]
    caption = f"Predicted: {time_text(plan.program.seconds)} from left to right. Point at a bar to read it."
    return element(
        "div",
        element("div", *legend, class_="legend"),
        figure(chart, None, caption, wide=True),
        class_="stack",
    )


def _says(each: Instruction, seconds: float) -> str:
    return f"{name_of(each).strip()}: {' '.join(each.before)} -> {each.after}, {time_text(seconds)}"


def _instructions(plan: HapPlan) -> Markup:
    rows = [
        [
            name_of(each),
            " ".join(each.before),
            each.after,
            time_text(each.compute_s),
            time_text(each.comm_s) if each.comm_s else "",
        ]
        for each in plan.program.instructions
    ]
    table = _table(("instruction", "inputs", "result", "compute", "moving bytes"), rows)
    head = element("summary", f"All {len(rows)} instructions")
    key = paragraph("I: all have it. G2: slices of dimension 2. R: summands of the full shape.")
    return element("details", head, key, table)


def _ratios(plan: HapPlan) -> list[Markup]:
    drawn = []
    for segment, ratios in enumerate(plan.ratios):
        heading = None if plan.segments == 1 else Markup(f"Segment {segment}")
        drawn.append(
            figure(_bars(plan, ratios), heading, "What each device does of every tensor that is cut.")
        )
    return drawn


def _bars(plan: HapPlan, ratios: Sequence[float]) -> Markup:
    most, parts = max(ratios) or 1.0, []
    for rank, (ratio, device) in enumerate(zip(ratios, plan.cluster.devices, strict=True)):
        y, width = ROW * rank, max((WIDTH - LEFT - 240) * ratio / most, HAIRLINE)
        parts.append(label(0, y + 18, f"{rank} {device.name}"[:16], "name"))
        parts.append(element("rect", x=LEFT, y=y + 4, width=width, height=ROW - 6, class_="compute"))
        words = f"{ratio:.1%} ({device.flops_per_s / 1e9:.3g} Gflop/s)"
        parts.append(label(LEFT + width + 8, y + 18, words, "tick"))
    return drawing(WIDTH, ROW * len(ratios) + 4, "Ratios of the devices", *parts)


# -- OSDP -------------------------------------------------------------------------------------


def _curve(plan: OsdpPlan) -> Markup:
    """Bytes on a device, operator by operator, forward and back, under the limit."""
    curve = memory_curve(plan)
    height, top = 220.0, max(plan.limit_bytes, *(size for _, size in curve)) or 1
    wide, parts = (WIDTH - LEFT) / max(len(curve), 1), []
    for place, (name, size) in enumerate(curve):
        tall = height * size / top
        bar = element(
            "rect", x=LEFT + place * wide, y=height - tall, width=wide, height=tall, class_="compute"
        )
        parts.append(titled(f"{name}: {size_text(size)}", bar))
    y = height * (1 - plan.limit_bytes / top)
    parts.append(element("line", x1=LEFT, x2=WIDTH, y1=y, y2=y, class_="mark"))
    parts.append(label(0, max(y + 4, 12), f"limit {size_text(plan.limit_bytes)}"[:18], "tick"))
    caption = "Forward, then backward. The dashed line is the limit."
    return figure(drawing(WIDTH, height + 4, "Memory over the step", *parts), None, caption, wide=True)


def _operators(plan: OsdpPlan) -> Markup:
    rows = [
        [op.name, mode_of(op), size_text(op.parameter_bytes), time_text(op.seconds), time_text(op.comm_s)]
        for op in plan.operators
    ]
    return _table(("operator", "mode", "parameters", "time", "of it moving bytes"), rows)
