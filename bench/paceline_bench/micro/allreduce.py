"""All-reduce without a store: ours over shared memory and over gloo, against what DDP does.

First one exchange, as in `exchange`: from *gradients ready* to *new weights there*. Then whole training steps
of small models, three sides in turns in the same run: ours over shared memory, ours over gloo, and torch's
DistributedDataParallel over gloo.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from typing import Literal

from paceline_bench.harness.crew import in_turns
from paceline_bench.harness.plan import BenchPlan, Say
from paceline_bench.harness.record import BenchRow, Value
from paceline_bench.harness.stations import GLOO_WAYS, ExchangeLoad, fastest_variant, gloo_crew, paceline_crew
from paceline_bench.harness.stats import paired_ratio, ratio_of_medians, spread
from paceline_bench.harness.trainings import TrainingTask, ddp_crew, our_crew

EXCHANGE_TARGETS: dict[float, float] = {100: 5.0, 1: 1.0}
NEVER_SLOWER = 0.0
CLOSE = 0.05
TASKS = (TrainingTask("cnn", 24, 32, 5), TrainingTask("transformer", 128, 16, 5))
QUICK_TASKS = (TrainingTask("cnn", 2, 4, 2), TrainingTask("transformer", 8, 2, 2))


def allreduce(plan: BenchPlan, say: Say) -> list[BenchRow]:
    """One exchange for all teams, then whole steps."""
    rows = [
        _exchange(ExchangeLoad(round(size * 1e6), "sgd", team, plan.seed), plan, size, say)
        for size in plan.sizes_mb
        for team in plan.teams
    ]
    for task in QUICK_TASKS if plan.quick else TASKS:
        rows += _whole_steps(task, ExchangeLoad(0, "sgd", plan.teams[0], plan.seed), plan, say)
    return rows


def _exchange(load: ExchangeLoad, plan: BenchPlan, size: float, say: Say) -> BenchRow:
    variant, way = fastest_variant(load, load.threads), GLOO_WAYS[-1]
    blocks, rounds = plan.rounds(size)
    with paceline_crew(load, "allreduce") as ours, gloo_crew(load, variant, way) as peer:
        for crew in (ours, peer):
            crew.muster()
            crew.block(plan.warm_up)
        mine, theirs = in_turns((ours, peer), blocks, rounds)
    value, interval = ratio_of_medians(theirs, mine, plan.seed)
    say(f"allreduce, one exchange of {size:g} MB among {load.workers}: {value:.1f}x")
    return BenchRow(
        case={
            "measured": "one exchange",
            "model": f"{size:g} MB",
            "workers": load.workers,
            "fabric": "shared",
        },
        measured={"paceline": spread(list(chain(*mine))), "gloo": spread(list(chain(*theirs)))},
        figure="speedup",
        value=value,
        interval=interval,
        target=None if plan.quick else EXCHANGE_TARGETS[size],
        remark=f"gloo: {way}, {variant} step",
    )


def _whole_steps(task: TrainingTask, load: ExchangeLoad, plan: BenchPlan, say: Say) -> list[BenchRow]:
    blocks, rounds = (2, 3) if plan.quick else (20, 4)
    fabrics: tuple[Literal["shared", "gloo"], ...] = ("shared", "gloo")
    with ExitStack() as stack:
        crews = [stack.enter_context(our_crew(task, load, fabric)) for fabric in fabrics]
        crews.append(stack.enter_context(ddp_crew(task, load)))
        for crew in crews:
            crew.muster()
            crew.block(plan.warm_up)
        before = [crew.cpu_s for crew in crews]
        *ours, theirs = [list(chain(*side)) for side in in_turns(crews, blocks, rounds)]
        *busy, busy_there = [crew.cpu_s - was for crew, was in zip(crews, before, strict=True)]
    rows = []
    for fabric, mine, target, cpu_s in zip(fabrics, ours, (NEVER_SLOWER, CLOSE), busy, strict=True):
        extra = f"processor time {100 * (cpu_s / busy_there - 1):+.1f} %" if busy_there else ""
        say(f"allreduce, {task.model} over {fabric}, against DDP: {extra}")
        case: dict[str, Value] = {
            "measured": "whole steps",
            "model": task.model,
            "workers": load.workers,
            "fabric": fabric,
        }
        rows.append(_row(case, task, mine, theirs, plan, target, extra))
    return rows


def _row(
    case: dict[str, Value],
    task: TrainingTask,
    ours: list[float],
    other: list[float],
    plan: BenchPlan,
    target: float,
    extra: str,
) -> BenchRow:
    """Our extra time per step, by the median over neighbouring rounds."""
    mine, theirs = ([seconds / task.steps for seconds in side] for side in (ours, other))
    ratio, interval = paired_ratio(mine, theirs, plan.seed)
    return BenchRow(
        case=case,
        measured={"paceline": spread(mine), "ddp": spread(theirs)},
        figure="overhead",
        value=ratio - 1,
        interval=type(interval)(interval.low - 1, interval.high - 1),
        target=None if plan.quick else target,
        remark=extra,
    )
