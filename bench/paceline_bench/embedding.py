"""Looking up and updating embedding tables: ours, TorchRec's, and a dense table that DDP keeps in step."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from paceline.parallel.plans.processes import run_ranks
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import ratio_of_medians, spread

WORKERS = 2
PATIENCE_S = 240.0
INSTALL = (
    "pip install --no-deps --target DIR torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics==1.0.3 "
    "pyre-extensions tqdm; then --torchrec DIR"
)


def embedding(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Many tables against TorchRec, one large one against DDP."""
    rows = 2_000 if plan.quick else 100_000
    many = {"tables": 8, "rows": rows, "width": 32, "batch": 512, "bag": 4, "optimizer": "row-wise adagrad"}
    large = {"tables": 1, "rows": 2_000 if plan.quick else 1_000_000, "width": 16, "batch": 512, "bag": 4}
    reason = why_no_torchrec(plan.torchrec)
    peers = ["paceline"] if reason else ["paceline", "torchrec"]
    made = [_row(plan, say, many, peers, "torchrec", 1.0, reason)]
    return [*made, _row(plan, say, large | {"optimizer": "sgd"}, ["paceline", "ddp"], "ddp", 3.0, "")]


def _row(
    plan: BenchPlan, say: Say, case: dict[str, Any], sides: list[str], peer: str, target: float, reason: str
) -> BenchRow:
    blocks, rounds = (2, 3) if plan.quick else (8, 6) if peer == "ddp" else (20, 20)
    say(
        f"embedding, against {peer}: {blocks} blocks of {rounds} steps"
        + (f", skipped: {reason}" if reason else "")
    )
    request = {**case, "sides": sides, "blocks": blocks, "rounds": rounds, "warm_up": plan.warm_up}
    paths = () if plan.torchrec is None else (plan.torchrec,)
    answers = run_ranks(
        "paceline_bench.embedding_ranks:measure",
        WORKERS,
        request | {"seed": plan.seed},
        timeout_s=PATIENCE_S,
        paths=paths,
    )
    seen = {side: _slowest([answer[side] for answer in answers]) for side in sides}
    value, interval = None, None
    if peer in seen:
        value, interval = ratio_of_medians(seen[peer], seen["paceline"], plan.seed)
        say(f"embedding: {peer} takes {value:.2f} times as long")
    return BenchRow(
        case={key: case[key] for key in ("tables", "rows", "width", "batch", "bag", "optimizer")}
        | {"workers": WORKERS, "against": peer},
        measured={side: spread([s for block in seen[side] for s in block]) for side in seen},
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick or value is None else target,
        remark=f"skipped: {reason}" if reason else "",
    )


def _slowest(answers: list[list[list[float]]]) -> list[list[float]]:
    """Of the workers, step by step."""
    return [[max(times) for times in zip(*blocks, strict=True)] for blocks in zip(*answers, strict=True)]


def why_no_torchrec(folder: str | None) -> str:
    """Why TorchRec cannot be measured, in one line; empty: it can."""
    found = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "import fbgemm_gpu, torchrec"],
        env=os.environ | {"PYTHONPATH": found},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines() or ["it ended without a word"]
    return f"TorchRec cannot be imported ({lines[-1].strip()[:120]}). To measure it: {INSTALL}"
