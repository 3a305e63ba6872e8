"""A pacer taken through whole rounds by hand, and the steps and pushes of a simulated run."""

from __future__ import annotations

from paceline.protocols import Decision, Pacer, Pacing
from paceline.sim import Cluster, simulate
from paceline.trace.events import AnyEvent, Decided


def started(protocol: Pacing, workers: int, planned: int | None = None) -> Pacer:
    """All there and computing."""
    pacer = Pacer(protocol)
    pacer.plan(planned)
    for worker in range(workers):
        pacer.join(worker, 0.0)
    return pacer


def rounds(pacer: Pacer, times: int, took: dict[int, float], begin: float = 0.0) -> list[Decision]:
    """Whole rounds of the active workers, each taking its own time; what their last pushes brought."""
    last = []
    for _ in range(times):
        pushes = sorted(
            (seconds, worker) for worker, seconds in took.items() if worker in pacer.clocks.active
        )
        for seconds, worker in pushes:
            decision = pacer.push(worker, begin + seconds)
        last.append(decision)
        begin += max(seconds for seconds, _ in pushes)
    return last


def trace_of(protocol: Pacing, cluster: Cluster, iterations: int, seed: int = 0) -> list[Decided]:
    """The decisions of a simulated run."""
    events: list[AnyEvent] = []
    simulate(protocol, cluster, iterations=iterations, seed=seed, trace=events.append, summarise=False)
    return [event for event in events if isinstance(event, Decided)]


def steps_and_pushes(decided: list[Decided]) -> tuple[int, int, int]:
    """Synchronous steps, asynchronous steps, pushes."""
    flushes = sum(event.flush is not None for event in decided)
    applied = sum(event.fate == "apply" for event in decided)
    return flushes, applied, sum(event.pushed is not None for event in decided)
