"""Events for tests: one of each kind, and whole runs made from decisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.protocols import Pacing
from paceline.trace.events import (
    SCHEMA,
    AnyEvent,
    Asked,
    Came,
    Decided,
    Evaluated,
    Exchanged,
    Gap,
    Heard,
    Kept,
    LeadPassed,
    LookedUp,
    Lookups,
    ModelReady,
    Note,
    Passed,
    Planned,
    Progress,
    Reported,
    Rested,
    RunEnded,
    RunStarted,
    Silent,
    Totals,
    WorkEnded,
    WorkerJoined,
    WorkerLeft,
)
from support.drive import Schedule, Step, drive


def started(workers: int = 2, **more: Any) -> RunStarted:
    """The first event of a run."""
    return RunStarted(
        0.0, SCHEMA, "a1", "ssp", {"staleness": 3}, workers, 7, True, "2024-05-01T12:00:00", **more
    )


ONE_OF_EACH: list[AnyEvent] = [
    started(script="digits.py", target=0.9, emulated={"slow": {"3": 2.5}}, summarised=True, family="peer"),
    ModelReady(0.1, 1000, 4000, 4000, samples_per_epoch=1797, batches_per_epoch=57),
    ModelReady(0.1, 1000, 4000, 4000),
    WorkerJoined(0.2, 0, pid=4711),
    WorkerJoined(0.2, 1),
    Decided(
        1.0,
        number=3,
        pushed=1,
        version=2,
        fate="hold",
        flush="mean",
        flushed=(0, 1),
        release=(1, 0),
        clock=2,
        samples=32,
        read=1,
        staleness=1,
        gap=2,
        lr_scale=0.5,
        compute_s=0.25,
        exchange_s=0.125,
        work=((0, 64, 32), (1, 0, 5)),
    ),
    Decided(1.5, number=4, pushed=None, version=2),
    Asked(0.25),
    Passed(0.25, 1, looks=3, asked=6),
    Exchanged(1.6, "average", (0, 1), 4096, seconds=0.25),
    Came(1.7, 1),
    LookedUp(1.75, 1, Lookups(count=3, ids=24, lookup_s=0.25, latency_s=0.5, longest_s=0.25)),
    Rested(1.8),
    Planned(0.3, 3),
    Reported(2.0, 0, 5, {"loss": 0.5, "any name": -1e300}),
    Evaluated(2.5, 0, 9, 288, {"accuracy": 0.75}, seconds=0.125),
    Silent(3.0, 1, 8.5, (0, 2), 12, "computing", "runs/a1"),
    Heard(3.0, 1, 30.5),
    Note(3.0, "warning", 'two lines\nand "quotes", a bell \a and naïve ✓'),
    WorkEnded(3.2, 0, "accurate enough"),
    LeadPassed(3.2, 1, 6, epoch=0),
    Kept(3.25, 500, 1600, copy_s=0.0625, write_s=0.5),
    Progress(3.5, 10, 320, 9, 4, 6, 1),
    Gap(3.75, 3.5, 17, "No space left on device"),
    Totals(4.0, 20, 640, 3, {0: 15, 2: 5}, (1.5, 2.0), (0.0, 0.5)),
    WorkerLeft(4.5, 1, "died", detail="signal 9", unfinished=32),
    WorkerLeft(4.5, 0, "finished"),
    RunEnded(5.0, "failed", detail="rank 1 died", user_mistake=True),
    RunEnded(5.0, "finished"),
]


def run_of(protocol: Pacing, schedule: Schedule, samples: int = 4) -> Iterator[AnyEvent]:
    """A driven schedule, told decision by decision."""
    ranks = {worker for _, worker in schedule.joins} | set(range(schedule.workers))
    now = 0.0
    yield started(max(ranks) + 1)
    for step in drive(protocol, schedule):
        now = step.now
        yield from _membership(step)
        yield _decided(step, samples)
    yield RunEnded(now, "finished")


def _membership(step: Step) -> Iterator[AnyEvent]:
    if step.event == "join":
        yield WorkerJoined(step.now, step.worker)
    elif step.event == "died":
        yield WorkerLeft(step.now, step.worker, "died")
    elif step.event == "finished":
        yield WorkerLeft(step.now, step.worker, "finished")


def _decided(step: Step, samples: int) -> Decided:
    decision = step.decision
    pushed = decision.pushed is not None
    return Decided(
        step.now,
        decision.number,
        decision.pushed,
        decision.version,
        fate=decision.fate.value if decision.fate else None,
        flush=decision.flush.value if decision.flush else None,
        flushed=tuple(decision.flushed),
        release=decision.release,
        clock=step.clocks.clock(step.worker) if pushed else 0,
        samples=samples if pushed else 0,
        staleness=decision.staleness,
        gap=decision.gap,
    )
