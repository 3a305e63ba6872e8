"""HAP's plan against even data parallel, on four emulated devices of unequal speed, and its own prediction.

Devices are emulated: an operation takes as long as its flops would on them, what is missing is slept.
Processes, tensors and collectives are real, over gloo on this machine."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.parallel.plans.measure_cluster import measure_cluster
from paceline.parallel.plans.processes import run_ranks
from paceline.plan.hap.graph import Graph
from paceline.plan.hap.plan import HapPlan, plan_hap
from paceline.plan.hap.trace import trace
from paceline.plan.profile import ClusterProfile
from paceline.plan.profile.files import write_json
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import paired_ratio, spread
from paceline_bench.plans import ddp, model

SPEEDS = (1, 1, 2, 4)
FASTER, APART = 1.5, 0.15
PATIENCE_S = 200.0


class TransformerTask(NamedTuple):
    """What is trained: a transformer, whose whole batch takes the fastest device so long."""

    width: int
    layers: int
    batch: int
    steps: int
    device_s: float


def hap(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """In turns."""
    task = TransformerTask(16, 1, 16, 4, 0.05) if plan.quick else TransformerTask(64, 2, 64, 12, 1.6)
    slow = {rank: max(SPEEDS) / speed for rank, speed in enumerate(SPEEDS) if speed < max(SPEEDS)}
    graph = trace(
        model.Letters(task.width, task.layers, 4), (torch.zeros(task.batch, 16, dtype=torch.long),)
    ).graph
    made = plan_hap(graph, _emulated(graph, task, slow), "letters", task.batch)
    ours, theirs = [], []
    for _ in range(1 if plan.quick else 3):
        ours.append(_ours(made, task, slow))
        theirs.append(_theirs(task, slow))
    return [_against(ours, theirs, made, plan, say), _prediction(ours, made, plan, say)]


def _emulated(graph: Graph, task: TransformerTask, slow: dict[int, float]) -> ClusterProfile:
    """Collectives as measured here, devices as emulated."""
    here = measure_cluster(len(SPEEDS), slow)
    fastest = 3 * sum(node.flops for node in graph.nodes) / task.device_s
    devices = tuple(
        msgspec.structs.replace(device, name="emulated", flops_per_s=fastest / slow.get(rank, 1.0))
        for rank, device in enumerate(here.devices)
    )
    return msgspec.structs.replace(here, devices=devices)


def _ours(made: HapPlan, task: TransformerTask, slow: dict[int, float]) -> float:
    """The median step of a run by the command."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        file = Path(folder) / "plan.json"
        write_json(file, made)
        devices = ["--device-time", str(task.device_s)]
        for rank, factor in slow.items():
            devices += ["--slow", f"{rank}:{factor:g}"]
        sizes = ["letters", *map(str, task[:4])]
        result = trained([*devices, "--plan", str(file), "--runs", folder], sizes)
    step: float = result["measured"]["step_s"]
    return step


def trained(
    options: list[str], args: list[str], where: Callable[[list[str]], list[str]] = lambda command: command
) -> dict[str, Any]:
    """The result of `paceline train` with the benchmark's script. `where`: the command on another host."""
    program = [sys.executable, "-m", "paceline", "train", model.__file__, *options, "--json", "--", *args]
    done = subprocess.run(where(program), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RunError(f"a planned run did not end well: {done.stderr.strip()[-300:]}")
    made: dict[str, Any] = decode_json(done.stdout)
    return made


def _theirs(task: TransformerTask, slow: dict[int, float]) -> float:
    config = RunConfig(run="bench", folder="", workers=len(SPEEDS), slow=slow, device_time_s=task.device_s)
    request = {"config": config, **task._asdict()}
    answers: list[list[float]] = run_ranks(ddp.TASK, len(SPEEDS), request, timeout_s=PATIENCE_S)
    return max(median(times) for times in answers)


def _against(ours: list[float], theirs: list[float], made: HapPlan, plan: BenchPlan, say: Say) -> BenchRow:
    value, interval = paired_ratio(theirs, ours, plan.seed)
    row = BenchRow(
        case={"measured": "whole steps", "planner": "hap", "model": "transformer", "for": _devices()},
        measured={"paceline": spread(ours), "ddp, even": spread(theirs)},
        figure="ratio",
        value=value,
        interval=interval if len(ours) > 1 else None,
        target=None if plan.quick else FASTER,
        remark=f"ratios {', '.join(f'{ratio:.3f}' for ratio in made.ratios[0])}; published: up to 2.41",
    )
    say(f"plans, HAP on {_devices()}: {row.shown} the samples/s of even DDP")
    return row


def _prediction(ours: list[float], made: HapPlan, plan: BenchPlan, say: Say) -> BenchRow:
    told, seen = made.predicted.seconds, median(ours)
    row = BenchRow(
        case={"measured": "prediction off by", "planner": "hap", "model": "transformer", "for": _devices()},
        measured={"paceline": spread(ours), "predicted": spread([told])},
        figure="share",
        value=abs(told - seen) / seen,
        target=None if plan.quick else APART,
    )
    say(f"plans, HAP predicts {told:.3f} s, measured {seen:.3f} s")
    return row


def _devices() -> str:
    return f"emulated devices of speed {', '.join(map(str, SPEEDS))}"
