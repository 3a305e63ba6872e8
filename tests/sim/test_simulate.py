"""Runs in virtual time: the same seed the same bits, every push once, and an end to every run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, RunError
from paceline.protocols import PACED, Clocks, Fate, Flush, Verdict
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP
from paceline.protocols.paced.ssp import SSP
from paceline.sim import Cluster, Fixed, Membership, simulate
from paceline.trace import TraceWriter, read_trace, tally
from paceline.trace.events import AnyEvent, Progress, RunEnded, RunStarted, Totals, WorkerJoined, WorkerLeft
from sim.clusters import clusters, decisions, pushes, run

names = st.sampled_from(sorted(PACED))
seeds = st.integers(0, 9999)
FEW = Cluster.from_flags(workers=3, compute_s=1.0, jitter=0.2, slow={2: 2.0})


@given(name=names, cluster=clusters(), seed=seeds)
def test_the_same_seed_gives_the_same_trace_bit_for_bit(name: str, cluster: Cluster, seed: int) -> None:
    protocol = PACED[name]()
    first, again = (msgspec.json.encode(run(protocol, cluster, seed=seed)) for _ in range(2))
    assert first == again


def test_another_seed_gives_another_run() -> None:
    assert run(SSP(), FEW, seed=1) != run(SSP(), FEW, seed=2)


@given(name=names, cluster=clusters(), seed=seeds)
def test_every_position_of_the_shared_budget_is_pushed_exactly_once(
    name: str, cluster: Cluster, seed: int
) -> None:
    done = [work for event in pushes(run(PACED[name](), cluster, seed=seed)) for work in event.work]
    firsts = range(0, 8 * cluster.workers * cluster.batch, cluster.batch)
    assert sorted(done) == [(0, first, cluster.batch) for first in firsts]


@given(name=names, cluster=clusters(churn=False), seed=seeds)
def test_with_equal_shards_everybody_does_the_same(name: str, cluster: Cluster, seed: int) -> None:
    done = [e.pushed for e in pushes(run(PACED[name](), cluster, seed=seed, equal_shards=True))]
    assert {worker: done.count(worker) for worker in done} == dict.fromkeys(range(cluster.workers), 8)


@given(name=names, cluster=clusters(), seed=seeds)
def test_with_equal_shards_only_a_lost_workers_share_is_missing(
    name: str, cluster: Cluster, seed: int
) -> None:
    events = run(PACED[name](), cluster, seed=seed, equal_shards=True)
    done = [event.pushed for event in pushes(events)]
    touched = {event.rank for event in cluster.event}
    assert all(done.count(worker) <= 8 for worker in touched)
    assert all(done.count(worker) == 8 for worker in range(cluster.workers) if worker not in touched)


@given(name=names, cluster=clusters(), seed=seeds, equal=st.booleans())
def test_a_summarised_run_comes_to_the_same_result(
    name: str, cluster: Cluster, seed: int, equal: bool
) -> None:
    protocol, shares, rest = PACED[name](), [], []
    for summarise in (False, True):
        ran = simulate(protocol, cluster, iterations=8, seed=seed, equal_shards=equal, summarise=summarise)
        shares.append(ran.result().waiting_share)
        rest.append(msgspec.structs.replace(ran.result(), waiting_share=[], bytes_sent_each=None))
    assert rest[0] == rest[1]
    assert shares[0] == pytest.approx(shares[1], abs=1e-12)


@given(name=names, cluster=clusters(), seed=seeds)
def test_time_never_runs_backwards_and_nobody_is_left_behind(name: str, cluster: Cluster, seed: int) -> None:
    events = run(PACED[name](), cluster, seed=seed)
    assert all(sooner.t <= later.t for sooner, later in pairwise(events))
    present: set[int] = set()
    for event in events:
        if isinstance(event, WorkerJoined):
            assert event.worker not in present
            present.add(event.worker)
        elif isinstance(event, WorkerLeft):
            present.remove(event.worker)
    assert not present
    assert events[-1] == RunEnded(events[-1].t, "finished")


def test_the_written_trace_adds_up_to_the_returned_result(tmp_path: Path) -> None:
    for summarise in (False, True):
        writer = TraceWriter(tmp_path / f"{summarise}.jsonl")
        ran = simulate(DSSP(), FEW, iterations=20, summarise=summarise, trace=writer.write)
        writer.close()
        assert tally(read_trace(tmp_path / f"{summarise}.jsonl")).result() == ran.result()


def test_a_trace_says_first_that_it_is_simulated_and_on_what() -> None:
    first = run(SSP(2), FEW, seed=5, run="r1", started_at="2024-05-01T12:00:00")[0]
    assert isinstance(first, RunStarted)
    assert (first.simulated, first.protocol, first.settings) == (True, "ssp", {"staleness": 2})
    assert (first.run, first.seed, first.workers, first.summarised) == ("r1", 5, 3, False)
    assert first.emulated == FEW.describe()


def test_bytes_are_unknown_without_a_model_and_counted_with_one() -> None:
    unknown = simulate(ASP(), FEW, iterations=2).result()
    assert unknown.bytes_sent is None
    assert (unknown.loss, unknown.accuracy, unknown.time_to_target_s) == (None, None, None)
    sized = msgspec.structs.replace(FEW, model_bytes=400)
    assert simulate(ASP(), sized, iterations=2).result().bytes_sent == 6 * 400


def test_a_large_run_is_summed_up_in_two_hundred_steps() -> None:
    events: list[AnyEvent] = []
    simulate(ASP(), Cluster(workers=100), iterations=20, summarise=True, trace=events.append)
    assert not decisions(events)
    assert 200 <= sum(isinstance(event, Progress) for event in events) <= 201
    totals = [event for event in events if isinstance(event, Totals)]
    assert [(total.pushes, sum(total.staleness.values())) for total in totals] == [(2000, 2000)]
    assert sum(totals[0].compute_s) == pytest.approx(2000 * 0.1)


def test_runs_are_summed_up_by_themselves_beyond_two_hundred_thousand_pushes() -> None:
    first: list[AnyEvent] = []

    def stop_at_once(event: AnyEvent) -> None:
        first.append(event)
        raise InterruptedError

    for iterations in (200, 201):
        with pytest.raises(InterruptedError):
            simulate(ASP(), Cluster(workers=1000), iterations=iterations, trace=stop_at_once)
    assert [event.summarised for event in first if isinstance(event, RunStarted)] == [False, True]


def test_progress_rises_to_one() -> None:
    shares: list[float] = []
    simulate(ASP(), Cluster(workers=100), iterations=200, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 2 <= len(shares) <= 4


def test_a_run_leaves_the_given_protocol_as_it_was() -> None:
    protocol = DSSP(lower=0, upper=4)
    run(protocol, FEW, iterations=40)
    assert protocol == DSSP(lower=0, upper=4)


def test_an_iteration_takes_pull_compute_push_and_the_stores_time() -> None:
    cluster = Cluster.from_flags(
        workers=1,
        compute_s=1.0,
        latency_s=0.25,
        bandwidth_bytes_per_s=100.0,
        model_bytes=50,
        apply_s=0.125,
    )
    result = simulate(BSP(), cluster, iterations=4).result()
    assert result.seconds == 4 * (0.75 + 1.0 + 0.75 + 0.125)


def test_the_store_serves_one_push_at_a_time_in_the_order_of_arrival() -> None:
    cluster = Cluster.from_flags(workers=4, compute_s=1.0, apply_s=0.5)
    events = pushes(run(ASP(), cluster, iterations=10))
    assert [event.pushed for event in events] == [0, 1, 2, 3] * 10
    assert [event.t for event in events] == [1.0 + 0.5 * n for n in range(40)]


def test_a_fast_worker_does_more_of_a_shared_budget() -> None:
    cluster = Cluster.from_flags(workers=2, compute_s=1.0, slow={1: 4.0})
    assert simulate(ASP(), cluster, iterations=50).clock == {0: 80, 1: 20}


def test_what_a_killed_worker_was_computing_is_done_by_one_that_had_finished() -> None:
    cluster = Cluster(workers=2, compute=Fixed(1.0), slow={1: 9.0}, event=(Membership(5.0, kill=1),))
    events = run(ASP(), cluster, iterations=1)
    assert [event.pushed for event in pushes(events)] == [0, 0]
    lost = [event for event in events if isinstance(event, WorkerLeft) and event.reason == "died"]
    assert [(event.worker, event.t, event.unfinished) for event in lost] == [(1, 5.0, 1)]
    assert events[-1].t == 6.0


def test_a_killed_worker_is_a_failure_and_keeps_nobody_waiting() -> None:
    cluster = Cluster(workers=3, compute=Fixed(1.0), event=(Membership(2.5, kill=1),))
    result = simulate(BSP(), cluster, iterations=10).result()
    assert [(failure.worker, failure.t) for failure in result.failures] == [(1, 2.5)]
    assert (result.samples, result.seconds) == (30, 2.0 + 24 / 2)


def test_a_worker_that_joins_later_takes_part_from_then_on() -> None:
    cluster = Cluster(workers=2, compute=Fixed(1.0), event=(Membership(10.0, join=1),))
    events = run(BSP(), cluster, iterations=10)
    assert min(event.t for event in pushes(events) if event.pushed == 1) == 11.0
    assert events[-1].t == 16.0  # ten alone, one while rank 0 waits, nine in twos


def test_a_run_that_has_lost_all_workers_fails_and_says_so() -> None:
    cluster = Cluster(workers=2, event=(Membership(0.25, kill=0), Membership(0.3, kill=1)))
    events: list[AnyEvent] = []
    with pytest.raises(RunError, match=r"all workers are lost, with 16 of 20 pushes undone"):
        simulate(ASP(), cluster, iterations=10, trace=events.append)
    assert isinstance(events[-1], RunEnded)
    assert events[-1].status == "failed"


@pytest.mark.parametrize("summarise", [False, True])
def test_a_run_waits_for_a_worker_that_will_come_back(summarise: bool) -> None:
    cluster = Cluster(workers=1, compute=Fixed(1.0), event=(Membership(2.5, kill=0), Membership(9.0, join=0)))
    result = simulate(ASP(), cluster, iterations=5, summarise=summarise).result()
    assert (result.seconds, result.samples) == (12.0, 5)


def test_one_that_is_there_already_does_not_join_a_second_time() -> None:
    """Within one moment losses come first, so rank 1 is never gone when it is to come back."""
    events = (Membership(0.0, join=1), Membership(0.0, kill=1), Membership(0.5, join=1))
    trace = run(BSP(), Cluster(workers=2, compute=Fixed(1.0), event=events))
    assert sum(isinstance(event, WorkerJoined) and event.worker == 1 for event in trace) == 1
    assert trace[-1] == RunEnded(8.0, "finished")


def test_a_push_lost_in_the_queue_of_the_store_holds_nobody_up() -> None:
    losses = (Membership(1.25, kill=0), Membership(1.25, kill=1), Membership(5.0, join=0))
    cluster = Cluster(workers=2, compute=Fixed(1.0), apply_s=0.5, event=losses)
    events = pushes(run(ASP(), cluster, iterations=2))
    assert [(event.t, event.pushed) for event in events] == [(1.0, 0), (6.0, 0), (7.5, 0), (9.0, 0)]


@dataclass(frozen=True)
class Stubborn:
    """Releases nobody."""

    asks: bool = False
    lockstep: ClassVar[bool] = False

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        return Verdict(ask_again_s=0.5 if self.asks else None)


@pytest.mark.parametrize("asks", [False, True])
def test_a_protocol_that_releases_nobody_is_named(asks: bool) -> None:
    with pytest.raises(RunError, match="protocol 'stubborn'"):
        simulate(Stubborn(asks), FEW, iterations=2)


@dataclass(frozen=True)
class Deadline:
    """Steps with what has come two seconds after the first of a round."""

    lockstep: ClassVar[bool] = False

    def decide(self, clocks: Clocks, pushed: int | None) -> Verdict:
        waits = [clocks.last_push_s(worker) or 0.0 for worker in clocks.waiting()]
        left = 2.0 - (clocks.now - min(waits, default=clocks.now))
        if waits and left <= 0:
            return Verdict(fate=Fate.HOLD, flush=Flush.MEAN, release=clocks.waiting())
        return Verdict(fate=Fate.HOLD, ask_again_s=left if waits else None)


def test_a_protocol_is_asked_again_when_the_time_it_named_has_come() -> None:
    cluster = Cluster.from_flags(workers=3, compute_s=1.0, slow={1: 2.5, 2: 10.0})
    flushes = [(e.t, e.flushed) for e in decisions(run(Deadline(), cluster, iterations=4)) if e.flush]
    assert flushes[:3] == [(3.0, (0, 1)), (6.0, (0, 1)), (9.0, (0, 1))]


@pytest.mark.parametrize("iterations", [0, -1])
def test_a_run_without_iterations_is_refused(iterations: int) -> None:
    with pytest.raises(ConfigError, match=f"iterations must be >= 1, got {iterations}"):
        simulate(ASP(), FEW, iterations=iterations)
