"""Advice in the terminal: what went in, what is advised, and how it looks by number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.plan.staleness.advice import Advice
from paceline.plan.staleness.outlook import Outlook

DASH = "—"
HEADINGS = ("arrivals/s", "staleness", "margin", "rate/s", "floor", "time to target")
STYLES = {"measured": "green", "given": "", "modelled": "yellow"}


def everything(advice: Advice) -> RenderableType:
    """All that is to be said, from the inputs to the warnings."""
    notes = [Text.assemble(("note: ", "yellow"), text) for text in (*advice.warnings, *advice.follow.notes)]
    follow = Text.assemble(("to follow: ", "bold"), f"{advice.follow.policy}\n  {advice.follow.flags}\n")
    return Group(_inputs(advice), "", _findings(advice), "", follow, _by_workers(advice), *notes)


def _inputs(advice: Advice) -> Table:
    table = _plain_table("input", "value", "", "")
    for fact in advice.inputs:
        value = fact.value if isinstance(fact.value, str) else f"{fact.value:.4g}"
        origin = Text(fact.origin, style=STYLES[fact.origin])
        table.add_row(fact.name, value, origin, Text(fact.note, style="dim"))
    return table


def _findings(advice: Advice) -> Table:
    table = _plain_table("advice", "", "")
    for name, value, note in _advised(advice):
        table.add_row(name, Text(value, style="bold"), Text(note, style="dim"))
    return table


def _advised(advice: Advice) -> Iterator[tuple[str, str, str]]:
    rates, now, all_of_them = advice.learning_rate, advice.now, f"all {advice.now.workers} workers"
    constant = f"below {_number(rates.critical_constant)} whatever the delays"
    yield "stable learning rate", f"below {_number(rates.critical)}", f"{all_of_them}; {constant}"
    smooth = f"no oscillation up to {_number(rates.smooth)}"
    yield "safe learning rate", f"up to {_number(rates.safe)}", smooth
    worse = f"load {now.load:.3g} of {_number(now.critical)} under these delays"
    yield "margin", f"{now.margin:.0%} of the bound", worse
    yield "convergence", _speed(now.rate_per_s), f"{now.rate_per_update:.3g} per update, {all_of_them}"
    worse = f"{now.floor_factor:.3g} times that of fresh gradients where it is sharpest"
    yield "error floor", _known(now.floor), worse if now.stable else ""
    if now.seconds_to_target is not None:
        yield "time to target", _time(now.seconds_to_target), all_of_them
    yield "active workers", *_active(advice)
    yield "update after", *_group(advice)
    yield "staleness threshold", *_threshold(advice)


def _active(advice: Advice) -> tuple[str, str]:
    best = advice.best
    if best is None:
        return "none", "the learning rate is too high for any number"
    gain = _speed(best.rate_per_s) if advice.objective == "rate" else _time(best.seconds_to_target)
    count = len(advice.active)
    ranks = ", ".join(map(str, advice.active)) if count <= 8 else f"the fastest {count}"
    parked = f"; ranks {ranks}" if count < advice.now.workers else ""
    return str(best.workers), f"by {advice.objective}: {gain}, margin {best.margin:.0%}{parked}"


def _group(advice: Advice) -> tuple[str, str]:
    if advice.group is None:
        return "each push", "averaging several before an update would not help"
    group = advice.groups[advice.group]
    return f"{advice.group} pushes", f"without waiting: {_speed(group.rate_per_s)}, margin {group.margin:.0%}"


def _threshold(advice: Advice) -> tuple[str, str]:
    one = advice.threshold
    if one is None:
        return "none", "dropping old gradients would not help"
    return f"{one.updates:.0f} updates", f"{one.seconds:.3g} s; {one.kept:.0%} of the gradients are kept"


def _by_workers(advice: Advice) -> Table:
    table = _plain_table("workers", *HEADINGS, right=True)
    rows = [(str(one.workers), one) for one in _telling(advice)]
    rows.append((f"{advice.lockstep.workers} in lockstep", advice.lockstep))
    if all(one.workers != advice.now.workers for _, one in rows[:-1]):
        rows.insert(-1, (str(advice.now.workers), advice.now))
    for name, one in rows:
        style = "bold" if one is advice.best else "" if one.stable else "dim"
        table.add_row(name, *_row(one), style=style)
    return table


def _row(one: Outlook) -> tuple[str, ...]:
    return (
        f"{one.arrivals_per_s:.4g}",
        f"{one.staleness:.3g}",
        f"{one.margin:.0%}" if one.stable else "unstable",
        f"{one.rate_per_s:.3g}",
        _known(one.floor),
        _time(one.seconds_to_target),
    )


def _telling(advice: Advice) -> list[Outlook]:
    """All counts if they are few, else the doublings, the best and its neighbours."""
    every = advice.workers
    if len(every) <= 16:
        return every
    best = advice.best.workers if advice.best else 0
    counts = {2**n for n in range(30)} | {best - 1, best, best + 1, every[-1].workers}
    return [one for one in every if one.workers in counts]


def _plain_table(*headings: str, right: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if right and number else "left", no_wrap=number < 2)
    return table


def _known(value: float | None) -> str:
    return DASH if value is None else _number(value)


def _number(value: float) -> str:
    return "any" if value == inf else f"{value:.3g}"


def _speed(per_s: float) -> str:
    return f"{per_s:.3g} per s" if per_s > 0 else "diverges"


def _time(value: float | None) -> str:
    return DASH if value is None else "never" if value == inf else f"{value:.3g} s"
