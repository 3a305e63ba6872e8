"""A run in virtual time, timing only: the pacer of a real run on a cluster that is only described.

No weights, no gradients, no processes: what is simulated is who computes, who waits and for how
long, which is all a paced protocol decides. The same seed gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from math import inf

from paceline.protocols import Pacer, Pacing, own
from paceline.protocols.rules import dropping
from paceline.protocols.rules.parking import check_parked
from paceline.protocols.rules.slow_parking import SlowParking
from paceline.protocols.settings import resolved
from paceline.sim.balanced import BalancedWork, check_balance
from paceline.sim.cluster import Cluster
from paceline.sim.compute import require
from paceline.sim.loop import Loop, name_of
from paceline.sim.record import Emit, Full, SimulationRecord, Summary
from paceline.sim.timing import Timing
from paceline.sim.work import EqualShards, SharedBudget, Work
from paceline.trace import Tally
from paceline.trace.events import SCHEMA, AnyEvent, ModelReady, Note, RunStarted

SUMMARISE_ABOVE = 200_000
"""Pushes beyond which a run is summed up instead of written decision by decision."""


def simulate(
    protocol: Pacing,
    cluster: Cluster,
    *,
    iterations: int,
    until_s: float | None = None,
    seed: int = 0,
    equal_shards: bool = False,
    balance: bool = False,
    drop_staler: int | None = None,
    park: Collection[int] = (),
    parking: SlowParking | None = None,
    summarise: bool | None = None,
    trace: Emit | None = None,
    progress: Callable[[float], None] | None = None,
    run: str = "simulated",
    started_at: str = "",
) -> Tally:
    """Run `iterations` per worker, on average, and add up what happened.

    The budget of workers x iterations is shared, so that fast workers do more, unless `equal_shards`. With
    `balance` every worker's batch follows its speed, and its compute time its batch. With `drop_staler`
    gradients that missed more updates than that are dropped. Ranks in `park` take no part, and `parking`
    parks slow ones during the run. With `until_s` the run stops at that time even if there is work left, and
    tells how far each worker got by then. `trace` takes every event (`TraceWriter.write`), `progress` the
    share done. The protocol given is not touched: the run works on a copy with a memory of its own.
    """
    require(iterations >= 1, "iterations must be >= 1", iterations, "Use --iterations 100, say.")
    ok = until_s is None or 0 < until_s < inf
    require(ok, "until_s must be > 0", until_s, "Leave it out to run all iterations.")
    workers = cluster.workers
    check_parked(park, workers, "equal" if equal_shards else "shared")
    total = workers * iterations
    summarised = total > SUMMARISE_ABOVE if summarise is None else summarise
    tally, pacer = Tally(), Pacer(deepcopy(protocol), drop_staler, parking)
    pacer.plan(total * cluster.batch)
    emit = _emit_to(tally, trace)
    for event in _opening(protocol, cluster, run, started_at, seed, summarised, balance):
        emit(event)
    if text := dropping.told(drop_staler, name_of(protocol), protocol.lockstep):
        emit(Note(0.0, "info", text))
    work = _work(
        cluster, total, equal_shards, balance, lambda text: emit(Note(pacer.clocks.now, "info", text))
    )
    timing = Timing(cluster, seed)
    exchange_s = [timing.pull_s(w) + timing.push_s(w) + cluster.apply_s for w in range(workers)]
    record: SimulationRecord
    if summarised:
        record = Summary(emit, pacer.clocks, workers, total)
    else:
        record = Full(emit, pacer.clocks, work.samples, 1 if balance else cluster.batch, exchange_s)
    Loop(pacer, cluster, timing, work, record, exchange_s).run(
        progress or (lambda share: None), until_s, park
    )
    return tally


def _work(
    cluster: Cluster, total: int, equal_shards: bool, balance: bool, tell: Callable[[str], None]
) -> Work:
    workers, batch = cluster.workers, cluster.batch
    if not balance:
        samples = [batch] * workers
        return (
            EqualShards(workers, total // workers, samples) if equal_shards else SharedBudget(total, samples)
        )
    check_balance(batch, equal_shards)
    return BalancedWork(total, workers, batch, tell)


def _emit_to(tally: Tally, trace: Emit | None) -> Emit:
    if trace is None:
        return tally.add

    def emit(event: AnyEvent) -> None:
        tally.add(event)
        trace(event)

    return emit


def _opening(
    protocol: Pacing, cluster: Cluster, run: str, started_at: str, seed: int, summarised: bool, balance: bool
) -> list[AnyEvent]:
    start = RunStarted(
        0.0,
        SCHEMA,
        run,
        name_of(protocol),
        resolved(protocol),
        cluster.workers,
        seed,
        simulated=True,
        started_at=started_at,
        emulated=cluster.describe(),
        balance=balance,
        summarised=summarised,
        protocol_sha256=own.digest(name_of(protocol)),
    )
    size = cluster.model_bytes
    return [start] if size is None else [start, ModelReady(0.0, size // 4, size, size)]
