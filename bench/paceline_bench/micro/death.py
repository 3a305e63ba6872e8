"""From SIGKILL of a worker to the store's `worker_left` event, on one clock.

The runs are real; only their clock's zero is written down, so that times in the trace can be
compared with the moment of the kill. Victims are killed at random moments: at rest, in the middle
of pushes of a large model, and while they hold gigabytes that the kernel must free first.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.errors import RunError
from paceline.fabric.channel import Channel
from paceline.runtime.owner.loop import RealLoop
from paceline.runtime.owner.owner import Owner
from paceline.trace import read_trace
from paceline.trace.events import WorkerLeft
from paceline_bench.harness.crew import BenchCrew
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stations import ExchangeLoad, paceline_crew
from paceline_bench.harness.stats import spread

TARGET_S = 0.2
ZERO = "zero"


class DeathCase(msgspec.Struct, frozen=True):
    """A situation to be killed in."""

    name: str
    size_mb: float
    workers: int
    busy: bool = False
    large: bool = False


CASES = (
    DeathCase("at rest", 1, 5),
    DeathCase("store busy with 100 MB AdamW", 100, 5, busy=True),
    DeathCase("victim holds 2 GB", 1, 3, large=True),
    DeathCase("victim holds 2 GB, store busy", 100, 3, busy=True, large=True),
)


def death(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Many kills of each kind."""
    quick = [DeathCase("at rest", 0.1, 3), DeathCase("store busy", 0.1, 3, busy=True)]
    cases = quick if plan.quick else CASES
    return [_case(case, plan, say) for case in cases]


def _case(case: DeathCase, plan: BenchPlan, say: Say) -> BenchRow:
    kills = 2 if plan.quick else 20
    rng, late = random.Random(plan.seed), list[float]()
    while len(late) < kills:
        late += _run(case, plan, rng)
        say(f"death, {case.name}: {len(late)} kills, {max(late):.3f} s at most")
    return BenchRow(
        case={"victim": case.name, "kills": len(late)},
        measured={"paceline": spread(late)},
        figure="seconds",
        value=max(late),
        target=None if plan.quick else TARGET_S,
        remark="the figure is the maximum",
    )


def _run(case: DeathCase, plan: BenchPlan, rng: random.Random) -> list[float]:
    """One run, in which all workers but the last are killed."""
    load = ExchangeLoad(round(case.size_mb * 1e6), "adamw", case.workers, plan.seed)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", ignore_cleanup_errors=True) as folder:
        with paceline_crew(load, "asp", folder, serve=serve_from_zero) as crew:
            crew.muster()
            killed = {rank: _kill(crew, rank, case, rng) for rank in reversed(range(1, case.workers))}
        return _delays(Path(folder), killed)


def _kill(crew: BenchCrew, victim: int, case: DeathCase, rng: random.Random) -> float:
    """Kill a worker while those before it go about their business; when."""
    crew.call("prepare", range(victim + 1))
    if case.large:
        crew.call("hold_memory", [victim])
    if case.busy:
        for rank in range(victim + 1):
            crew.tell(rank, "toil")
    time.sleep(rng.uniform(0.1, 0.4))
    at = time.monotonic()
    os.kill(crew.pids[victim], signal.SIGKILL)
    if case.busy:
        for rank in range(victim):
            crew.hear(rank)
    else:
        time.sleep(0.3)
    return at


def _delays(folder: Path, killed: dict[int, float]) -> list[float]:
    zero = float((folder / ZERO).read_text())
    left = {
        e.worker: zero + e.t for e in read_trace(folder) if isinstance(e, WorkerLeft) and e.reason == "died"
    }
    if left.keys() != killed.keys():
        raise RunError(f"ranks {sorted(killed)} were killed, but the store noticed {sorted(left)}.")
    return [left[rank] - at for rank, at in killed.items()]


class Clock:
    """The monotonic clock, remembering its first reading: the zero of the run's own time."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self) -> float:
        now = time.monotonic()
        self.first = now if self.first is None else self.first
        return now


def serve_from_zero(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> None:
    """The owner's process, noting when its time began."""
    clock = Clock()
    owner = Owner(config, clock)
    try:
        RealLoop(owner, workers, stop).run()
    finally:
        owner.close()
        (config.path / ZERO).write_text(repr(clock.first))
