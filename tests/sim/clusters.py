"""Random clusters for Hypothesis, and what tests read from a simulated run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from paceline.protocols import Pacing
from paceline.sim import Cluster, Exponential, Fixed, Link, Lognormal, Membership, Pareto, Transient, simulate
from paceline.trace.events import AnyEvent, Decided, WorkerJoined, WorkerLeft


def clusters(workers: int = 6, churn: bool = True) -> st.SearchStrategy[Cluster]:
    """Unequal workers, slow phases, links, a busy store; with `churn` all but rank 0 come and go."""
    return st.integers(1, workers).flatmap(lambda count: _clusters(count, churn))


def _clusters(workers: int, churn: bool) -> st.SearchStrategy[Cluster]:
    ranks = st.integers(0, workers - 1)
    models = st.sampled_from([Fixed(1.0), Lognormal(1.0, 0.3), Exponential(1.0, 0.5), Pareto(1.0, 0.1)])
    return st.builds(
        Cluster,
        workers=st.just(workers),
        compute=models,
        batch=st.integers(1, 4),
        model_bytes=st.just(100),
        apply_s=st.sampled_from([0.0, 0.0, 0.125, 0.6]),
        link=st.builds(Link, st.sampled_from([0.0, 0.01]), st.sampled_from([None, 1e3])),
        slow=st.dictionaries(ranks, st.sampled_from([0.5, 2.0, 3.0]), max_size=2),
        transient=st.sampled_from([None, Transient(3.0, 4.0, 6.0)]),
        event=_events(workers) if churn and workers > 1 else st.just(()),
    )


def _events(workers: int) -> st.SearchStrategy[tuple[Membership, ...]]:
    times = st.lists(st.integers(0, 40).map(lambda n: n / 2), unique=True, max_size=3).map(sorted)
    lives = st.lists(st.tuples(times, st.booleans()), min_size=workers - 1, max_size=workers - 1)
    return lives.map(lambda each: tuple(_life_events(each)))


def _life_events(lives: list[tuple[list[float], bool]]) -> Iterator[Membership]:
    for rank, (times, joins_first) in enumerate(lives, 1):
        for number, at_s in enumerate(times):
            joins = joins_first == (number % 2 == 0)
            yield Membership(at_s, join=rank) if joins else Membership(at_s, kill=rank)


def run(protocol: Pacing, cluster: Cluster, **more: Any) -> list[AnyEvent]:
    """The whole trace of a simulated run."""
    events: list[AnyEvent] = []
    simulate(protocol, cluster, trace=events.append, **{"iterations": 8, "summarise": False, **more})
    return events


def decisions(events: list[AnyEvent]) -> list[Decided]:
    return [event for event in events if isinstance(event, Decided)]


def pushes(events: list[AnyEvent]) -> list[Decided]:
    return [event for event in decisions(events) if event.pushed is not None]


def gaps_at_start(events: list[AnyEvent]) -> Iterator[int]:
    """The lead over the slowest with which each iteration began, counted afresh from the trace."""
    clock: dict[int, int] = {}
    floor = 0
    for event in events:
        if isinstance(event, WorkerJoined):
            clock[event.worker] = min(clock.values(), default=floor)
        elif isinstance(event, WorkerLeft):
            floor = min(clock.values())
            del clock[event.worker]
        elif isinstance(event, Decided):
            if event.pushed is not None:
                clock[event.pushed] += 1
            yield from (clock[worker] - min(clock.values()) for worker in event.release)
