"""Push and pull through the parameter store, against a torch RPC server and a warm Ray actor.

Every worker pushes a gradient, the store makes an optimizer step of each, and every worker gets
the weights that resulted. All start together; a round ends when the last has its weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain

from paceline_bench.harness import ray_server
from paceline_bench.harness.crew import BenchCrew, in_turns
from paceline_bench.harness.machine import exchange_limit_s, update_passes
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.servers import rpc_crew
from paceline_bench.harness.stations import ExchangeLoad, fastest_variant, paceline_crew
from paceline_bench.harness.stats import ratio_of_medians, spread

TARGETS: dict[tuple[str, float], float] = {
    ("torch rpc", 100): 5.0,
    ("ray", 100): 3.0,
    ("torch rpc", 1): 3.0,
    ("ray", 1): 3.0,
}


def store(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Every size, optimizer and number of workers; one row per peer."""
    rows: list[BenchRow] = []
    for size in plan.sizes_mb:
        for optimizer, workers in _cases(plan):
            load = ExchangeLoad(round(size * 1e6), optimizer, workers, plan.seed)
            rows += _case(load, plan, size, say)
    return rows


def _cases(plan: BenchPlan) -> list[tuple[str, int]]:
    if plan.quick:
        return [("sgd", 1), ("adamw", 2)]
    return [(optimizer, workers) for optimizer in ("sgd", "adamw") for workers in (1, *plan.teams)]


def _case(load: ExchangeLoad, plan: BenchPlan, size: float, say: Say) -> list[BenchRow]:
    variant = fastest_variant(load, os.cpu_count() or 1, flat=True)
    makers: list[Callable[[], BenchCrew]] = [lambda: paceline_crew(load, "asp")]
    makers.append(lambda: rpc_crew(load, variant))
    if ray_server.installed():
        makers.append(lambda: ray_server.ray_crew(load, variant))
    else:
        say("Ray is not installed, so it is not compared with: pip install 'paceline[bench]'")
    blocks, rounds = plan.rounds(size)
    with ExitStack() as stack:
        crews = []
        for make in makers:
            crews.append(stack.enter_context(make()))
            crews[-1].muster()
            crews[-1].block(plan.warm_up)
        names, seen = [crew.name for crew in crews], in_turns(crews, blocks, rounds)
    limit = _limit_s(load)
    rows = [
        _row(load, plan, size, variant, name, seen[0], theirs, limit) for name, theirs in _peers(names, seen)
    ]
    for row in rows:
        say(f"store {row.case}: {row.value:.1f}x")
    return rows


def _peers(names: list[str], seen: list[list[list[float]]]) -> list[tuple[str, list[list[float]]]]:
    return list(zip(names[1:], seen[1:], strict=True))


def _row(
    load: ExchangeLoad,
    plan: BenchPlan,
    size: float,
    variant: str,
    name: str,
    mine: list[list[float]],
    theirs: list[list[float]],
    limit_s: float,
) -> BenchRow:
    value, interval = ratio_of_medians(theirs, mine, plan.seed)
    return BenchRow(
        case={"MB": size, "optimizer": load.optimizer, "workers": load.workers, "peer": name},
        measured={"paceline": spread(list(chain(*mine))), "peer": spread(list(chain(*theirs)))},
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick else TARGETS.get((name, size)),
        limit_s=limit_s,
        remark=f"peer: {variant} step",
    )


def _limit_s(load: ExchangeLoad) -> float:
    """Per push: the gradient read, weights and state both ways, and the worker's copy written; a message each
    way."""
    passes = load.workers * (2 + update_passes(load.optimizer))
    return exchange_limit_s(load.size_bytes, passes, load.workers)
