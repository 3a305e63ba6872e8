"""Simulated against measured samples/s: every protocol on every testbed, in virtual time and in real time."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from paceline.errors import unknown
from paceline.testbed.system import need_privileges
from paceline_bench.cluster.cluster import hosts_of
from paceline_bench.cluster.entries import Entry, entries, every_entry
from paceline_bench.cluster.results import Outcome, Results
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import Series, on_hosts
from paceline_bench.cluster.table import remarks
from paceline_bench.cluster.testbed import RealHosts
from paceline_bench.cluster.virtual import VirtualHosts
from paceline_bench.experiment import carried_out
from paceline_bench.fidelity.beds import BEDS, QUICK_BED
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow

NEAR = 0.10
"""How far the simulated samples/s may be from those measured."""
QUICK_NAMES = ("ddp", "bsp", "allreduce")


def check(plan: BenchPlan) -> None:
    """Whether there is all that it takes, before anything is measured."""
    need_privileges()
    beds_of(plan)
    chosen(plan)
    Results(_file(plan))


def beds_of(plan: BenchPlan) -> list[Scene]:
    """The testbeds."""
    if plan.quick:
        return [QUICK_BED]
    for name in plan.scenes:
        if name not in BEDS:
            raise unknown("testbed", name, BEDS)
    return [BEDS[name] for name in plan.scenes or BEDS]


def chosen(plan: BenchPlan) -> list[Entry]:
    """What runs on them."""
    if plan.protocols:
        return entries(plan.protocols)
    return entries(QUICK_NAMES) if plan.quick else every_entry()


def fidelity(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """All runs, simulated ones first, then the table."""
    results = Results(_file(plan))
    virtual, real = _series(plan, True), _series(plan, False)

    def rows() -> list[BenchRow]:
        pairs = zip(virtual, real, strict=True)
        return [_row(entry, *pair, results) for pair in pairs for entry in pair[0].sides]

    def opened(each: Series[Entry], folder: Path) -> VirtualHosts | RealHosts:
        return hosts_of(each, folder, folder)  # there is nothing to learn from

    experiment = on_hosts("fidelity", [*virtual, *real], results, opened, told, rows)
    return carried_out(experiment, plan, say)


def _series(plan: BenchPlan, simulated: bool) -> list[Series[Entry]]:
    who, here = chosen(plan), version("paceline")
    return [Series(bed, who, (), (plan.seed,), simulated, here) for bed in beds_of(plan)]


def _row(entry: Entry, virtual: Series[Entry], real: Series[Entry], results: Results) -> BenchRow:
    bed = virtual.scene
    ran = [results.get(job) for each in (virtual, real) for job in each.jobs(entry, each.seeds[0], results)]
    simulated, measured = (_pace(outcome) for outcome in ran)
    ratio = simulated / measured if simulated and measured else None
    said = [text for outcome in ran if outcome for text in remarks(outcome, bed, outcome.job.simulated)]
    return BenchRow(
        case={
            "testbed": bed.name,
            "protocol": entry.title,
            "settings": entry.shown,
            "simulated samples/s": round(simulated),
            "measured samples/s": round(measured),
            "ratio": "" if ratio is None else f"{ratio:.2f}",
        },
        measured={},
        figure="share",
        value=None if ratio is None else abs(ratio - 1.0),
        target=NEAR,
        remark="; ".join(dict.fromkeys(said)),
    )


def _pace(outcome: Outcome | None) -> float:
    return 0.0 if outcome is None or outcome.figures is None else outcome.figures.steady_per_s


def told(outcome: Outcome, bed: Scene) -> str:
    """A run in one line."""
    said = remarks(outcome, bed, outcome.job.simulated)
    return ", ".join([f"{_pace(outcome):.0f} samples/s", *said])


def _file(plan: BenchPlan) -> Path | None:
    return None if plan.results is None else Path(plan.results)
