"""Seconds per batch of pipelines: ours, whose stages do not wait, and torch's, which empty for every batch.

Four equal blocks on four workers with emulated devices: forward one unit of time, backward two. What theory
allows: GPipe and 1F1B with M micro-batches take 3 (M + 3) / M units for a batch, a pipeline without bubbles 3
with stored graphs and 4 where batches are computed once more, whatever the slowest stage takes else.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from paceline.bench import pipeline_script, pipeline_torch
from paceline.bench.harness.plan import BenchPlan, Say
from paceline.bench.harness.record import BenchRow
from paceline.bench.harness.stats import Spread, spread
from paceline.bench.pipeline_script import STAGES
from paceline.errors import RunError
from paceline.trace import read_trace
from paceline.trace.events import Decided

PATIENCE_S = 300.0
REACHED = 0.9
"""Of what theory allows."""


class Case(NamedTuple):
    """One of our pipelines, and the units of time that theory gives it for a batch."""

    protocol: str
    units: float
    slow: float = 1.0
    """How much slower stage 1 is."""


CASES = (
    Case("adl", 3.0),
    Case("fdg", 3.0),
    Case("layerwise", 4.0),
    Case("adl", 6.0, slow=2.0),
    Case("layerwise", 8.0, slow=2.0),
)


def pipelines(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Ours against theory, and against torch's schedules."""
    unit, batches = (0.01, 8) if plan.quick else (0.06, 30)
    ours = {case: _ours(case, unit, batches) for case in (CASES[:1] if plan.quick else CASES)}
    rows = [_against_theory(case, seen, unit, plan, say) for case, seen in ours.items()]
    for micro in (4,) if plan.quick else (4, 8, 16):
        for name in list(pipeline_torch.SCHEDULES)[-1:] if plan.quick else pipeline_torch.SCHEDULES:
            theirs = _theirs(name, micro, unit, batches // 2)
            for case in [case for case in ours if case.slow == 1.0]:
                rows.append(_against_torch(case, ours[case], name, micro, theirs, unit, plan, say))
    return rows


def _against_theory(case: Case, seen: Spread, unit: float, plan: BenchPlan, say: Say) -> BenchRow:
    share = case.units * unit / seen.median
    say(f"pipeline, {case.protocol} x{case.slow:g}: {seen.median / unit:.2f} units, theory {case.units:g}")
    return BenchRow(
        case={"protocol": case.protocol, "slowest stage": f"{case.slow:g}x", "against": "theory"},
        measured={"paceline": seen, "theory": spread([case.units * unit])},
        figure="ratio",
        value=share,
        target=None if plan.quick else REACHED,
        remark=f"{seen.median / unit:.2f} of {case.units:g} units",
    )


def _against_torch(
    case: Case, seen: Spread, name: str, micro: int, theirs: Spread, unit: float, plan: BenchPlan, say: Say
) -> BenchRow:
    allowed = 3.0 * (micro + STAGES - 1) / micro / case.units
    value = theirs.median / seen.median
    say(f"pipeline, {case.protocol} against {name} with {micro}: {value:.2f}, theory {allowed:.2f}")
    return BenchRow(
        case={"protocol": case.protocol, "slowest stage": "1x", "against": f"{name}, {micro} micro-batches"},
        measured={"paceline": seen, name: theirs},
        figure="speedup",
        value=value,
        target=None if plan.quick else REACHED * allowed,
        remark=f"theory allows {allowed:.2f}; theirs {theirs.median / unit:.2f} units",
    )


def _ours(case: Case, unit: float, batches: int) -> Spread:
    """Between two updates of the last stage, once the pipeline is full and until it runs dry."""
    with tempfile.TemporaryDirectory() as folder:
        slow = ["--slow", f"1:{case.slow:g}"] if case.slow != 1.0 else []
        dials = ["--mesh", f"stage={STAGES}", "-p", case.protocol, "--device-time", str(3 * unit), *slow]
        program = [sys.executable, "-m", "paceline", "train", pipeline_script.__file__, *dials]
        command = [*program, "--runs", folder, "--", str(batches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise RunError(f"{case.protocol} did not run: {done.stderr.strip()[-300:]}")
        last = STAGES - 1
        events = read_trace(Path(folder) / "latest")
        times = [e.t for e in events if isinstance(e, Decided) and e.pushed == last]
    return _steady(times)


def _theirs(name: str, micro: int, unit: float, batches: int) -> Spread:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, pipeline_torch.__file__, name]
        told = [f"{folder}/meeting", str(micro), str(batches), str(unit)]
        stages = [
            subprocess.Popen([*command, str(rank), *told], stdout=subprocess.PIPE, text=True)
            for rank in range(STAGES)
        ]
        try:
            text = [stage.communicate(timeout=PATIENCE_S)[0] for stage in stages]
        finally:
            for stage in stages:
                stage.kill()
                stage.wait()
        if any(stage.returncode for stage in stages):
            raise RunError(f"torch's {name} with {micro} micro-batches did not run.")
    return _steady([float(line) for line in text[0].split()])


def _steady(times: list[float]) -> Spread:
    """Seconds from one batch to the next, without the first ones."""
    kept = times[len(times) // 4 :]
    gaps = [later - sooner for sooner, later in pairwise(kept)]
    assert median(gaps) > 0
    return spread(gaps)
