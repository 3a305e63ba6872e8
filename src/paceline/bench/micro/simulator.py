"""How long the simulator takes for ten thousand workers, for every protocol it can run."""

from __future__ import annotations

import time

from paceline.bench.harness.plan import BenchPlan, Say
from paceline.bench.harness.record import BenchRow
from paceline.bench.harness.stats import spread
from paceline.protocols import PACED, Pacing
from paceline.protocols.settings import make
from paceline.sim import Cluster, Lognormal, simulate

TARGET_S = 10.0


def simulator(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Every registered protocol, with its default settings, on workers of uneven speed."""
    workers, iterations = (100, 5) if plan.quick else (10_000, 100)
    paced = {name: make(name, {}) for name in sorted(PACED)}
    rows = []
    for name, protocol in paced.items():
        took = [_seconds(protocol, workers, iterations, plan.seed) for _ in range(1 if plan.quick else 3)]
        rows.append(
            BenchRow(
                case={"protocol": name, "workers": workers, "iterations": iterations},
                measured={"paceline": spread(took)},
                figure="seconds",
                value=spread(took).median,
                target=None if plan.quick else TARGET_S,
            )
        )
        say(f"simulator, {name}: {rows[-1].value:.2f} s")
    return rows


def _seconds(protocol: Pacing, workers: int, iterations: int, seed: int) -> float:
    cluster = Cluster(workers=workers, compute=Lognormal(0.1, 0.3))
    began = time.perf_counter()
    done = simulate(protocol, cluster, iterations=iterations, seed=seed)
    spent = time.perf_counter() - began
    assert done.pushes == workers * iterations, "a simulation that ended early proves nothing"
    return spent
