"""One worker under the engine against plain PyTorch: the same model, data and loop.

Two ways. *In one process*: a prepared and a plain training, block after block in turns, in the
order ABBA; whatever disturbs the machine disturbs neighbours alike, so this resolves one percent.
*As commands*: `paceline train` and `python`, in alternating processes, with the launcher, its
progress bar and its reading of the trace beside them; closer to what a user does, and noisier.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.machine import copy_bandwidth, memory_limit_s
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import paired_ratio, spread
from paceline_bench.micro import lone_script
from paceline_bench.micro.lone_script import LoneTraining

TARGET = 0.01
COMMAND_TIMEOUT_S = 300.0


class Model(msgspec.Struct, frozen=True):
    """A CNN of about so many milliseconds per step."""

    name: str
    width: int
    batch: int
    steps: int
    """Per block."""


MODELS = (Model("few ms per step", 16, 64, 50), Model("about 20 ms per step", 32, 256, 10))

QUICK = Model("tiny", 2, 8, 3)


class LoneStation:
    """A plain training and one under Paceline, side by side in one process."""

    def __init__(self, model: Model, folder: str, seed: int) -> None:
        import paceline
        from paceline.runtime import seat

        torch.set_num_threads(os.cpu_count() or 1)
        seat.take(seat.Seat(0, RunConfig(run="lone", folder=folder, seed=seed), None))
        self._steps = model.steps
        self._plain, self._paced = (LoneTraining(model.width, model.batch, seed) for _ in range(2))
        pace = paceline.join("bsp")
        self._paced.prepare(pace)
        self.world = pace.size

    def prepare(self) -> None:
        """Warm both up."""
        self.plain()
        self.paced()

    def plain(self) -> None:
        """A block of plain PyTorch."""
        self._plain.train(self._steps)

    def paced(self) -> None:
        """The same block under Paceline."""
        self._paced.train(self._steps)

    def exchange(self) -> None:
        """Nothing to exchange: a lone worker has nobody to exchange with."""

    def close(self) -> None:
        """Nothing to leave."""


def lone(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Both models, both ways."""
    rows = []
    for model in (QUICK,) if plan.quick else MODELS:
        for way, measure in (("in one process", _in_one_process), ("as commands", _as_commands)):
            paced, plain = measure(model, plan)
            rows.append(_row(model, way, paced, plain, plan))
            say(f"lone, {model.name}, {way}: {rows[-1].shown}")
    return rows


def _row(model: Model, way: str, paced: list[float], plain: list[float], plan: BenchPlan) -> BenchRow:
    ratio, interval = paired_ratio(paced, plain, plan.seed)
    return BenchRow(
        case={"model": model.name, "measured": way, "pairs": len(paced)},
        measured={"paceline": spread(paced), "plain PyTorch": spread(plain)},
        figure="overhead",
        value=ratio - 1,
        interval=msgspec.structs.replace(interval, low=interval.low - 1, high=interval.high - 1),
        target=None if plan.quick else TARGET,
        limit_s=spread(plain).median + _look_s(model),
        remark="per step",
    )


def _look_s(model: Model) -> float:
    """The least that a look for NaN takes: all gradients are read once."""
    parameters = LoneTraining(model.width, 1, 0).model.parameters()
    size_bytes = sum(each.numel() * each.element_size() for each in parameters)
    return memory_limit_s(size_bytes, 1, copy_bandwidth(size_bytes))


def _in_one_process(model: Model, plan: BenchPlan) -> tuple[list[float], list[float]]:
    pairs = 3 if plan.quick else 150
    seen: dict[str, list[float]] = {"paced": [], "plain": []}
    with (
        tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder,
        BenchCrew("lone", [partial(LoneStation, model, folder, plan.seed)]) as crew,
    ):
        crew.muster()
        crew.call("prepare")
        for pair in range(pairs):
            for side in ("paced", "plain") if pair % 2 else ("plain", "paced"):
                (done,) = crew.call(side)
                seen[side].append((done.ended - done.began) / model.steps)
    return seen["paced"], seen["plain"]


def _as_commands(model: Model, plan: BenchPlan) -> tuple[list[float], list[float]]:
    pairs, steps = (1, 20) if plan.quick else (8, 40 * model.steps)
    seen: dict[Callable[..., float], list[float]] = {_command: [], _python: []}
    for pair in range(pairs):
        for run in (_command, _python) if pair % 2 else (_python, _command):
            seen[run].append(run(model, steps) / steps)
    return seen[_command], seen[_python]


def _arguments(model: Model, steps: int) -> list[str]:
    return ["--width", str(model.width), "--batch", str(model.batch), "--steps", str(steps)]


def _python(model: Model, steps: int) -> float:
    script = str(Path(lone_script.__file__))
    return float(_output([sys.executable, script, "--plain", *_arguments(model, steps)]))


def _command(model: Model, steps: int) -> float:
    """Under the engine a worker's output stands in its log."""
    script = str(Path(lone_script.__file__))
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as runs:
        start = [sys.executable, "-c", "from paceline.cli.main import main; main()"]
        _output([*start, "train", script, "--workers", "1", "--runs", runs, "--", *_arguments(model, steps)])
        (log,) = (Path(runs) / "latest").glob("logs/rank0.log")
        return float(log.read_text().split()[-1])


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    if done.returncode:
        raise RunError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout
