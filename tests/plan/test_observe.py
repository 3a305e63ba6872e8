"""Delays from traces and from cluster files."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.plan.staleness import from_cluster, from_run
from paceline.protocols import PACED
from paceline.sim import Cluster, Exponential, Fixed, Group, Link, Lognormal, Transient, simulate
from paceline.trace import TraceWriter
from paceline.trace.events import SCHEMA, Decided, RunStarted, WorkerJoined, WorkerLeft


def recorded(folder, protocol, cluster, **more):
    writer = TraceWriter(folder / "trace.jsonl")
    simulate(
        PACED[protocol](), cluster, trace=writer.write, **{"iterations": 100, "summarise": False, **more}
    )
    writer.close()
    return folder


def written(folder, *events):
    writer = TraceWriter(folder / "trace.jsonl")
    writer.write(RunStarted(0.0, SCHEMA, "r", "asp", {}, 2, 0, False, ""))
    for event in events:
        writer.write(event)
    writer.close()
    return folder


def push(t, worker, number, compute_s=0.5, exchange_s=0.0, release=True):
    return Decided(
        t, number, worker, number, fate="apply", release=(worker,) if release else (), staleness=1,
        compute_s=compute_s, exchange_s=exchange_s,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["asp", "bsp", "ssp"])
def test_cycles_are_those_of_the_cluster_whoever_waited_for_whom(tmp_path, protocol):
    cluster = Cluster(workers=4, compute=Lognormal(1.0, 0.2), slow={3: 2.5}, link=Link(latency_s=0.05))
    observed = from_run(recorded(tmp_path, protocol, cluster))
    means = [law.mean for law in observed.crew.cycles]
    assert means == pytest.approx([1.1, 1.1, 1.1, 2.6], rel=0.08)
    assert observed.protocol == protocol
    assert not observed.measured  # it was simulated


def test_arrivals_and_staleness_of_an_asynchronous_run(tmp_path):
    cluster = Cluster(workers=8, compute=Lognormal(1.0, 0.3))
    observed = from_run(recorded(tmp_path, "asp", cluster, iterations=200))
    assert observed.staleness == pytest.approx(7.0, rel=0.02)
    assert observed.arrivals_per_s == pytest.approx(8.0, rel=0.05)
    assert observed.crew.flow(8).per_s == pytest.approx(observed.arrivals_per_s, rel=0.02)


@pytest.mark.parametrize("apply_s", [0.02, 0.08])
def test_queueing_at_a_busy_store_is_not_taken_for_computing(tmp_path, apply_s):
    cluster = Cluster(workers=10, compute=Exponential(1.0, 1.0), apply_s=apply_s)
    observed = from_run(recorded(tmp_path, "asp", cluster, iterations=300))
    assert observed.crew.shared_s == apply_s
    alone = observed.crew.flow(1)
    assert 1 / alone.per_s == pytest.approx(1.0 + apply_s, rel=0.12)
    assert observed.crew.flow(10).per_s == pytest.approx(observed.arrivals_per_s, rel=0.08)


def test_a_cycle_lasts_from_release_to_push_and_the_first_one_is_left_out(tmp_path):
    run = written(
        tmp_path,
        WorkerJoined(0.0, 0),
        push(9.0, 0, 1),  # warming up
        push(10.0, 0, 2, exchange_s=0.1),
        push(12.0, 0, 3, release=False, exchange_s=0.1),  # waits for four seconds
        Decided(16.0, 4, None, 3, release=(0,)),
        push(17.5, 0, 5, exchange_s=0.1),
        WorkerLeft(18.0, 0, "away"),
        WorkerJoined(30.0, 0),
        push(39.0, 0, 6),  # warming up again
        push(40.5, 0, 7),
    )
    observed = from_run(run)
    assert observed.crew.cycles[0].times == pytest.approx((1.0, 1.5, 1.5, 2.0))
    assert observed.measured
    assert observed.crew.shared_s == pytest.approx(0.3 / 6)


def test_a_run_without_whole_iterations_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no whole iteration"):
        from_run(written(tmp_path, WorkerJoined(0.0, 0), push(1.0, 0, 1)))


def test_a_summed_up_run_is_refused_with_the_reason(tmp_path):
    run = recorded(tmp_path, "asp", Cluster(workers=2), summarise=True)
    with pytest.raises(ConfigError, match="summed up"):
        from_run(run)


def test_a_cluster_has_the_cycles_it_describes():
    cluster = Cluster(
        workers=6,
        compute=Fixed(1.0),
        apply_s=0.1,
        link=Link(latency_s=0.2),
        group=(Group(4), Group(2, slow=3.0)),
    )
    crew = from_cluster(cluster, "test").crew
    assert [law.mean for law in crew.cycles] == pytest.approx([1.5] * 4 + [3.5] * 2)
    assert crew.shared_s == 0.1
    assert crew.cycles[0] is crew.cycles[3]


def test_slow_phases_of_a_cluster_are_in_its_delays():
    slow = Cluster(workers=2, compute=Fixed(1.0), transient=Transient(3.0, 10.0, 10.0))
    assert from_cluster(slow, "test").crew.cycles[0].mean == pytest.approx(1.5, rel=0.1)
