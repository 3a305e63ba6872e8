"""How long the simulator takes for ten thousand workers, for every protocol it can run."""

from __future__ import annotations

import time
from itertools import count, islice
from random import Random

from paceline.protocols import PACED, Pacing
from paceline.protocols.settings import make
from paceline.sim import Cluster, Lognormal, simulate
from paceline.sim.agenda import ARRIVAL, Agenda
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stats import spread

TARGET_S = 10.0


def simulator(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Every registered protocol, with its default settings, on workers of uneven speed."""
    workers, iterations = (100, 5) if plan.quick else (10_000, 100)
    paced = {name: make(name, {}) for name in sorted(PACED)}
    rows, limit_s = [], _bare_s(workers, iterations)
    for name, protocol in paced.items():
        took = [_seconds(protocol, workers, iterations, plan.seed) for _ in range(1 if plan.quick else 3)]
        rows.append(
            BenchRow(
                case={"protocol": name, "workers": workers, "iterations": iterations},
                measured={"paceline": spread(took)},
                figure="seconds",
                value=spread(took).median,
                target=None if plan.quick else TARGET_S,
                limit_s=limit_s,
                remark="limit: events planned and taken, and nothing decided",
            )
        )
        say(f"simulator, {name}: {rows[-1].value:.2f} s")
    return rows


def _bare_s(workers: int, iterations: int, measured: int = 20) -> float:
    """What the events alone take, each planned and taken in the order of time; of a few iterations, times
    their number."""
    rounds, gaps = min(iterations, measured), Random(0)
    took = [gaps.lognormvariate(0.0, 0.3) * 0.1 for _ in range(4096)]
    agenda, number = Agenda(), count()
    began = time.perf_counter()
    for worker in range(workers):
        agenda.add((took[worker & 4095], ARRIVAL, next(number), worker, 0.0, 0))
    for event in islice(agenda, workers * (rounds - 1)):
        at = next(number)
        agenda.add((event[0] + took[at & 4095], ARRIVAL, at, event[3], 0.0, 0))
    assert sum(1 for _ in agenda) == workers, "every event that was planned is taken"
    return (time.perf_counter() - began) * iterations / rounds


def _seconds(protocol: Pacing, workers: int, iterations: int, seed: int) -> float:
    cluster = Cluster(workers=workers, compute=Lognormal(0.1, 0.3))
    began = time.perf_counter()
    done = simulate(protocol, cluster, iterations=iterations, seed=seed)
    spent = time.perf_counter() - began
    assert done.pushes == workers * iterations, "a simulation that ended early proves nothing"
    return spent
