"""One BSP exchange: from *gradients ready* to *new weights readable*, against DDP's all-reduce.

Both sides start together, the longest of the workers counts, blocks of rounds alternate. The other
side has its gradients in flat buckets already, and runs in whichever way was fastest just before.
"""

from __future__ import annotations

from itertools import chain
from statistics import median

from paceline_bench.harness.crew import in_turns
from paceline_bench.harness.machine import exchange_limit_s, update_passes
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow
from paceline_bench.harness.stations import GLOO_WAYS, ExchangeLoad, fastest_variant, gloo_crew, paceline_crew
from paceline_bench.harness.stats import ratio_of_medians, spread

TARGETS: dict[float, float] = {100: 5.0, 1: 3.0}


def exchange(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """Every size, optimizer and number of workers."""
    rows = []
    for size in plan.sizes_mb:
        for optimizer in ("sgd", "adamw"):
            for workers in plan.teams:
                load = ExchangeLoad(round(size * 1e6), optimizer, workers, plan.seed)
                rows.append(_case(load, plan, size, say))
    return rows


def _case(load: ExchangeLoad, plan: BenchPlan, size: float, say: Say) -> BenchRow:
    variant, way = fastest_variant(load, load.threads), _fastest_way(load, plan)
    blocks, rounds = plan.rounds(size)
    with paceline_crew(load, "bsp") as ours, gloo_crew(load, variant, way) as peer:
        for crew in (ours, peer):
            crew.muster()
            crew.block(plan.warm_up)
        mine, theirs = in_turns((ours, peer), blocks, rounds)
    value, interval = ratio_of_medians(theirs, mine, plan.seed)
    passes = load.workers + update_passes(load.optimizer)
    row = BenchRow(
        case={"MB": size, "optimizer": load.optimizer, "workers": load.workers},
        measured={"paceline": spread(list(chain(*mine))), "gloo": spread(list(chain(*theirs)))},
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick else TARGETS.get(size),
        limit_s=exchange_limit_s(load.size_bytes, passes, load.workers),
        remark=f"gloo: {way}, {variant} step",
    )
    say(f"exchange {row.case}: {value:.1f}x")
    return row


def _fastest_way(load: ExchangeLoad, plan: BenchPlan) -> str:
    """A short race of the ways to all-reduce, each in processes of its own."""
    took = {}
    for way in GLOO_WAYS:
        with gloo_crew(load, "fused", way) as crew:
            crew.muster()
            crew.block(2)
            took[way] = median(crew.block(plan.race))
    return min(took, key=lambda way: took[way])
