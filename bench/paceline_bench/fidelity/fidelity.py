"""Simulated against measured samples/s: every protocol on every testbed, in virtual time and in real time."""

from __future__ import annotations

import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

from paceline.errors import unknown
from paceline.testbed.system import need_privileges
from paceline_bench.cluster.entries import Entry, entries, every_entry
from paceline_bench.cluster.results import Outcome, Results
from paceline_bench.cluster.scene import Scene
from paceline_bench.cluster.series import Series, run_all
from paceline_bench.cluster.table import remarks
from paceline_bench.cluster.testbed import RealHosts
from paceline_bench.cluster.virtual import VirtualHosts
from paceline_bench.fidelity.beds import BEDS, QUICK_BED
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow

NEAR = 0.10
"""How far the simulated samples/s may be from those measured."""
QUICK_NAMES = ("ddp", "bsp", "allreduce")

Hosts = type[VirtualHosts | RealHosts]


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
    if plan.results is not None:
        say(f"fidelity: {len(results)} runs are in {plan.results} already; what is missing is added to it")
    sides = {simulated: _series(plan, simulated) for simulated in (True, False)}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for simulated, series in sides.items():
            say(f"fidelity: {'simulating' if simulated else 'measuring'}")
            hosts: Hosts = VirtualHosts if simulated else RealHosts
            run_all(series, partial(_opened, hosts, Path(folder)), results, say, told)
    return [
        _row(virtual.scene, entry, virtual, real, results)
        for virtual, real in zip(sides[True], sides[False], strict=True)
        for entry in virtual.entries
    ]


def _series(plan: BenchPlan, simulated: bool) -> list[Series]:
    who, here = chosen(plan), version("paceline")
    return [Series(bed, who, (), (plan.seed,), simulated, here) for bed in beds_of(plan)]


def _opened(hosts: Hosts, folder: Path, bed: Scene) -> VirtualHosts | RealHosts:
    return hosts(bed, folder, Path(tempfile.mkdtemp(dir=folder)))


def _row(bed: Scene, entry: Entry, virtual: Series, real: Series, results: Results) -> BenchRow:
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
