"""A HAP plan for people: the program, instruction by instruction, the ratios, and the simple alternatives."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.plan.hap.plan import HapPlan
from paceline.plan.hap.program import Instruction
from paceline.plan.profile.units import size_text, time_text

WORDS = {
    "all_gather": "gather", "slice": "slice", "reduce_scatter": "add up and scatter", "all_reduce": "add up",
    "all_to_all": "exchange", "finish": "finish",
}  # fmt: skip


def everything(plan: HapPlan) -> RenderableType:
    """All of it."""
    notes = [Text(f"note: {note}") for note in plan.notes]
    verdict = Text(plan.verdict())
    return Group(_head(plan), *notes, _program(plan), _ratios(plan), _alternatives(plan), verdict)


def _head(plan: HapPlan) -> Text:
    return Text(
        f"{plan.model}: batch {plan.batch} over {plan.workers} devices. "
        "I: all have it, G2: slices of dimension 2, R: summands."
    )


def _program(plan: HapPlan) -> Table:
    table = Table(
        "instruction", "inputs", "result", "compute", "moving bytes", title="program", title_justify="left"
    )
    for each in plan.program.instructions:
        table.add_row(
            name_of(each), " ".join(each.before), each.after, time_text(each.compute_s), _moving(each)
        )
    return table


def name_of(each: Instruction) -> str:
    """What it does, in words."""
    if each.kind == "compute":
        return each.tensor
    how = f", {each.variant}" if each.variant else ""
    return f"  {WORDS[each.kind]} {each.tensor}{how}"


def _moving(each: Instruction) -> str:
    return time_text(each.comm_s) if each.comm_s else ""


def _ratios(plan: HapPlan) -> Text:
    rows = []
    for segment, ratios in enumerate(plan.ratios):
        name = "ratios" if plan.segments == 1 else f"ratios of segment {segment}"
        rows.append(f"{name}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return Text("\n".join(rows))


def _alternatives(plan: HapPlan) -> Table:
    table = Table(
        "", "step", "samples/s", "memory", "fits", title="against the simple ways", title_justify="left"
    )
    for name, row in {"this plan": plan.predicted, **plan.simple()}.items():
        fits = "yes" if row.fits else "no"
        memory = size_text(row.memory_bytes)
        table.add_row(name, time_text(row.seconds), f"{row.samples_per_s:.1f}", memory, fits)
    return table
