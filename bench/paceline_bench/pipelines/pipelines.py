"""Seconds per batch of pipelines: ours, whose stages do not wait, and torch's, which empty for every batch.

Four equal blocks on four workers with emulated devices: forward one unit of time, backward two. What theory
allows: GPipe and 1F1B with M micro-batches take 3 (M + 3) / M units for a batch, a pipeline without bubbles 3
with stored graphs and 4 where batches are computed once more (an emulated device does one thing at a time, so
the second forward hides behind nothing), stages that take turns (bp) 12, and with a slower stage what that
stage takes alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.trace import read_trace
from paceline.trace.events import Decided
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import Spread, spread
from paceline_bench.pipelines import script, torch_side
from paceline_bench.pipelines.accuracy import Speeds, to_accuracy
from paceline_bench.pipelines.script import STAGES

PATIENCE_S = 300.0
REACHED = 0.9
"""Of what theory allows."""
MICRO = (4, 8, 16)


class PipelineCase(NamedTuple):
    """One of our pipelines, and the units of time that theory gives it for a batch."""

    protocol: str
    units: float
    slow: float = 1.0
    """How much slower stage 1 is."""


CASES = (
    PipelineCase("bp", 12.0),
    PipelineCase("adl", 3.0),
    PipelineCase("fdg", 3.0),
    PipelineCase("layerwise", 4.0),
    PipelineCase("adl", 6.0, slow=2.0),
    PipelineCase("layerwise", 8.0, slow=2.0),
)


def pipelines(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Ours against theory, and against torch's schedules; then how many samples each needs."""
    unit, batches = (0.01, 8) if plan.quick else (0.05, 24)
    cases = CASES[1:2] if plan.quick else CASES
    ours: dict[PipelineCase, Spread] = {}
    for number, case in enumerate(cases, 1):
        say(f"pipeline, {number} of {len(cases)} of ours: {case.protocol}, slowest stage {case.slow:g}x")
        ours[case] = _ours(case, unit, batches)
    rows = [_against_theory(case, seen, unit, plan, say) for case, seen in ours.items()]
    cells = [("1f1b", 4)] if plan.quick else [(name, m) for m in MICRO for name in torch_side.SCHEDULES]
    say(f"pipeline, torch's schedules: {len(cells)} of them")
    theirs = _theirs(cells, unit, 4 if plan.quick else 12)
    for (name, micro), seen in theirs.items():
        for case in [case for case in ours if case.slow == 1.0]:
            rows.append(_against_torch(case, ours[case], name, micro, seen, unit, plan, say))
    speeds = Speeds(
        {case.protocol: ours[case].median for case in ours if case.slow == 1.0},
        min(seen.median for seen in theirs.values()),
    )
    return rows + to_accuracy(speeds, plan, say)


def _against_theory(case: PipelineCase, seen: Spread, unit: float, plan: BenchPlan, say: Say) -> BenchRow:
    share = case.units * unit / seen.median
    say(f"pipeline, {case.protocol} x{case.slow:g}: {seen.median / unit:.2f} units, theory {case.units:g}")
    return BenchRow(
        case={"protocol": case.protocol, "slowest stage": f"{case.slow:g}x", "against": "theory"},
        measured={"paceline": seen, "theory": spread([case.units * unit])},
        figure="ratio",
        table="Seconds per batch",
        value=share,
        target=None if plan.quick else REACHED,
        remark=f"{seen.median / unit:.2f} of {case.units:g} units",
    )


def allowed_speedup(case: PipelineCase, micro: int) -> float:
    """How many times faster than torch's schedules with so many micro-batches theory lets a pipeline be."""
    return 3.0 * (micro + STAGES - 1) / micro / case.units


def _against_torch(
    case: PipelineCase,
    seen: Spread,
    name: str,
    micro: int,
    theirs: Spread,
    unit: float,
    plan: BenchPlan,
    say: Say,
) -> BenchRow:
    allowed = allowed_speedup(case, micro)
    value = theirs.median / seen.median
    say(f"pipeline, {case.protocol} against {name} with {micro}: {value:.2f}, theory {allowed:.2f}")
    return BenchRow(
        case={"protocol": case.protocol, "slowest stage": "1x", "against": f"{name}, {micro} micro-batches"},
        measured={"paceline": seen, name: theirs},
        figure="ratio",
        table="Seconds per batch",
        value=value,
        target=None if plan.quick else REACHED * allowed,
        remark=f"theory allows {allowed:.2f}; theirs {theirs.median / unit:.2f} units",
    )


def _ours(case: PipelineCase, unit: float, batches: int) -> Spread:
    """Between two updates of the last stage, once the pipeline is full and until it runs dry."""
    with tempfile.TemporaryDirectory() as folder:
        slow = ["--slow", f"1:{case.slow:g}"] if case.slow != 1.0 else []
        dials = ["--mesh", f"stage={STAGES}", "-p", case.protocol, "--device-time", str(3 * unit), *slow]
        program = [sys.executable, "-m", "paceline", "train", script.__file__, *dials]
        command = [*program, "--runs", folder, "--", str(batches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise RunError(f"{case.protocol} did not run: {done.stderr.strip()[-300:]}")
        last = STAGES - 1
        events = read_trace(Path(folder) / "latest")
        times = [e.t for e in events if isinstance(e, Decided) and e.pushed == last]
    return _steady(times)


def _theirs(cells: list[tuple[str, int]], unit: float, batches: int) -> dict[tuple[str, int], Spread]:
    """All schedules in turn, in the same four processes."""
    with tempfile.TemporaryDirectory() as folder:
        told = torch_side.StageTask(f"{folder}/meeting", cells, batches, unit)
        command = [sys.executable, "-m", torch_side.__name__, msgspec.json.encode(told).decode()]
        stages = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(STAGES)
        ]
        try:
            text = [stage.communicate(timeout=PATIENCE_S)[0] for stage in stages]
        finally:
            for stage in stages:
                stage.kill()
                stage.wait()
        if any(stage.returncode for stage in stages):
            raise RunError("torch's schedules did not run.")
    found = decode_json(text[0], kind=list[list[float]])
    return {cell: _steady(times) for cell, times in zip(cells, found, strict=True)}


def _steady(times: list[float]) -> Spread:
    """Seconds from one batch to the next, without the first ones."""
    kept = times[len(times) // 4 :]
    return spread([later - sooner for sooner, later in pairwise(kept)])
