"""A model whose weights do not fit one worker trains on four, and costs what the cost model says."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.trace import read_trace
from paceline.trace.events import Decided
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.harness.stats import Spread, spread
from paceline_bench.layers import script
from paceline_bench.layers.script import MARK, Size, WorkerFigures

PATIENCE_S = 300.0
FULL = Size(width=1024, depth=24, batch=16, batches=24, budget_mb=80)
SMALL = Size(width=512, depth=32, batch=4, batches=4, budget_mb=24)


def layers(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """One worker, which cannot; then four, by rows, and by rows and columns in turn."""
    size = SMALL if plan.quick else FULL
    weights = size.weight_bytes / (1 << 20)
    say(f"layers: {weights:.0f} MiB of weights on one worker with {size.budget_mb} MiB")
    rows = [] if plan.quick else [_alone(size, say)]
    for pair in (False,) if plan.quick else (False, True):
        say(f"layers: the same on four workers with {size.budget_mb} MiB each{', in pairs' if pair else ''}")
        rows.append(_split(size, pair, say))
    return rows


def _alone(size: Size, say: Say) -> BenchRow:
    done, _ = _train(size, ["--workers", "1"])
    if done.returncode == 0:
        raise RunError(f"one worker trained within {size.budget_mb} MiB: this model is no test of a budget.")
    said = done.stderr.lower()
    if "memory" not in said:
        raise RunError(f"one worker failed for another reason than memory: {done.stderr.strip()[-300:]}")
    say("layers: one worker ran out of memory, as it has to")
    return BenchRow(
        case=_case(size, "1", "-") | {"trains": "no: out of memory"},
        measured={},
        figure="seconds",
        value=None,
    )


def _split(size: Size, pair: bool, say: Say) -> BenchRow:
    with tempfile.TemporaryDirectory() as runs:
        dials = ["--mesh", "model=4", "-p", "row_split", "--set", f"pair={str(pair).lower()}"]
        done, folder = _train(size, dials, runs)
        if done.returncode:
            raise RunError(f"four workers did not train: {done.stderr.strip()[-300:]}")
        seen = [_seen(folder, rank) for rank in range(4)]
        steps = _steps(folder)
    for rank, each in enumerate(seen):
        check(rank, each)
    model, measured = seen[0].model, seen[0].measured
    say(f"layers: {steps.median * 1e3:.1f} ms per step; cost model and measurement agree")
    figures: dict[str, Value] = {
        "weights": f"{measured.weight_bytes / 2**20:.2f} MiB (model {model.weight_bytes / 2**20:.2f})",
        "bytes": f"{measured.sent_bytes:,.0f} (model {model.sent_bytes:,.0f})",
        "synchronisations": f"{measured.synchronisations} (model {model.synchronisations})",
        "multiply-adds": f"{measured.multiply_adds:,.0f} (model {model.multiply_adds:,.0f})",
    }
    return BenchRow(
        case=_case(size, "4", "rows and columns" if pair else "rows") | {"trains": "yes"} | figures,
        measured={"paceline": steps},
        figure="seconds",
        value=steps.median,
        remark="multiply-adds lack the gradient of the data, which nobody asks for",
    )


def check(rank: int, seen: WorkerFigures) -> None:
    """Memory, bytes and synchronisations are the cost model's to the last one; sums, but for the first."""
    for name in ("weight_bytes", "sent_bytes", "synchronisations"):
        model, measured = getattr(seen.model, name), getattr(seen.measured, name)
        if model != measured:
            raise RunError(f"worker {rank}: {name} is {measured:,.0f}, and {model:,.0f} by the cost model.")
    if not 0.9 * seen.model.multiply_adds <= seen.measured.multiply_adds <= seen.model.multiply_adds:
        raise RunError(
            f"worker {rank} did {seen.measured.multiply_adds:,.0f} multiply-adds, the cost model says "
            f"{seen.model.multiply_adds:,.0f}."
        )


def _case(size: Size, workers: str, split: str) -> dict[str, Value]:
    model = f"{size.depth} x {size.width}, {size.weight_bytes / 2**20:.0f} MiB"
    return {"model": model, "budget": f"{size.budget_mb} MiB", "workers": workers, "split": split}


def _train(
    size: Size, dials: list[str], runs: str | None = None
) -> tuple[subprocess.CompletedProcess[str], Path]:
    with tempfile.TemporaryDirectory() as spare:
        folder = runs or spare
        program = [sys.executable, "-m", "paceline", "train", script.__file__, *dials, "--runs", folder]
        command = [*program, "--", msgspec.json.encode(size).decode()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    return done, Path(folder) / "latest"


def _seen(folder: Path, rank: int) -> WorkerFigures:
    log = (folder / "logs" / f"rank{rank}.log").read_text()
    line = next(line for line in log.splitlines() if line.startswith(MARK))
    return decode_json(line.removeprefix(MARK), kind=WorkerFigures)


def _steps(folder: Path) -> Spread:
    """Seconds from one update to the next, without the first ones."""
    times = [e.t for e in read_trace(folder) if isinstance(e, Decided) and e.pushed == 0]
    kept = times[len(times) // 4 :]
    return spread([later - sooner for sooner, later in pairwise(kept)])
