"""An OSDP plan as tables for people."""

from __future__ import annotations

from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.plan.osdp.plan import OperatorPlan, OsdpPlan, PlanFigures, memory_curve
from paceline.plan.profile.units import size_text, time_text

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60


def everything(plan: OsdpPlan) -> RenderableType:
    """Operators, memory over the step, alternatives."""
    said = why_simplest(plan)
    reason = [Text(said)] if said else []
    return Group(_head(plan), _operators(plan), _curve(plan), _alternatives(plan), *reason, _next(plan))


def _head(plan: OsdpPlan) -> Text:
    return Text(
        f"{plan.model}: {plan.workers} workers x batch {plan.batch}, "
        f"at most {size_text(plan.limit_bytes)} each" + (", communication overlapped" if plan.overlap else "")
    )


def _operators(plan: OsdpPlan) -> Table:
    """Neighbours that are alike share a row."""
    table = Table("operator", "mode", "parameters", "held", "while at work", "time", "of it moving bytes")
    for column in table.columns[2:]:
        column.justify = "right"
    for _, alike in groupby(
        plan.operators, key=lambda op: (op.kind, op.parameter_bytes, op.mode, op.sharded)
    ):
        ops = list(alike)
        name = ops[0].name if len(ops) == 1 else f"{ops[0].name} ... {ops[-1].name} ({len(ops)}x)"
        table.add_row(
            name,
            mode_of(ops[0]),
            size_text(sum(op.parameter_bytes for op in ops)),
            size_text(sum(op.memory_bytes for op in ops)),
            size_text(max(op.surge_bytes for op in ops)),
            time_text(sum(op.seconds for op in ops)),
            time_text(sum(op.comm_s for op in ops)),
        )
    return table


def mode_of(op: OperatorPlan) -> str:
    """In words."""
    if not op.parameter_bytes:
        return ""
    if op.slices > 1:
        return f"{op.sharded} of {op.slices} slices sharded"
    return {"dp": "replicated", "zdp": "sharded", "keep": "sharded, kept", "mixed": "mixed"}[op.mode]


def _curve(plan: OsdpPlan) -> Text:
    curve = [size for _, size in memory_curve(plan)]
    step = max(1, -(-len(curve) // WIDTH))
    heights = [max(curve[i : i + step]) for i in range(0, len(curve), step)]
    top, bottom = max(heights), min(heights)
    scale = (len(BARS) - 1) / max(top - bottom, 1)
    bars = "".join(BARS[round((height - bottom) * scale)] for height in heights)
    return Text(f"memory over the step {bars} {size_text(bottom)} to {size_text(top)}")


def _alternatives(plan: OsdpPlan) -> Table:
    table = Table(
        "", "memory", "step", "samples/s", "fits", title="against the simple plans", title_justify="left"
    )
    for name, row in {"this plan": plan.predicted, **plan.simple()}.items():
        table.add_row(name, *_figures(row))
    return table


def _figures(row: PlanFigures) -> tuple[str, str, str, str]:
    fits = "yes" if row.fits else "no"
    return size_text(row.memory_bytes), step_text(row), f"{row.samples_per_s:.1f}", fits


def step_text(row: PlanFigures) -> str:
    """A step's time, and the range that measured transfers leave it."""
    low, high = row.low_s, row.high_s
    if low is None or high is None or high - low <= 1e-3 * row.seconds:
        return time_text(row.seconds)
    return f"{time_text(row.seconds)} ({time_text(low)} to {time_text(high)})"


def why_simplest(plan: OsdpPlan) -> str:
    """One sentence if times could not tell a simpler plan from the fastest."""
    if plan.instead_of_s is None:
        return ""
    fastest, taken = time_text(plan.instead_of_s), time_text(plan.predicted.seconds)
    return (
        f"taken: {plan.simplest}. By the medians the fastest plan takes {fastest} a step instead of {taken}, "
        "but measured transfers vary by more than that."
    )


def _next(plan: OsdpPlan) -> Text:
    if plan.next_gib is None:
        return Text("one GiB more would buy nothing")
    rate, batch = plan.next_gib.samples_per_s, plan.next_gib.batch
    gain = rate / plan.predicted.samples_per_s - 1
    return Text(f"one GiB more would buy {gain:.1%}: {rate:.1f} samples/s with batch {batch}")
