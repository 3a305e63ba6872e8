"""Balance in virtual time, where times are exact: who is always slow gets less to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.protocols import PACED
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.ssp import SSP
from paceline.protocols.rules.balance import MEASUREMENTS
from paceline.sim import Cluster, Membership, Recorded, simulate
from paceline.trace import TraceWriter
from paceline.trace.events import Note, RunStarted
from sim.clusters import clusters, decisions, pushes, run

STRAGGLER = Cluster.from_flags(workers=4, compute_s=1.0, slow={3: 2.5}, batch=34)
"""Equal times are at batches of 40, 40, 40 and 16."""
names = st.sampled_from(sorted(PACED))


def test_balanced_lockstep_takes_the_time_of_equal_shares() -> None:
    plain = simulate(BSP(), STRAGGLER, iterations=100).result()
    balanced = simulate(BSP(), STRAGGLER, iterations=100, balance=True).result()
    assert plain.seconds == 100 * 2.5
    measuring = MEASUREMENTS + 1  # sizes change after a round is released
    assert balanced.seconds == pytest.approx(measuring * 2.5 + (100 - measuring) * 40 / 34)
    assert balanced.samples == plain.samples == 4 * 34 * 100
    assert balanced.balance


def test_a_bound_on_staleness_cannot_raise_the_rate_of_unequal_workers_and_balance_can() -> None:
    ssp = simulate(SSP(3), STRAGGLER, iterations=200).result()
    balanced = simulate(BSP(), STRAGGLER, iterations=200, balance=True).result()
    lockstep = simulate(BSP(), STRAGGLER, iterations=200).result()
    assert ssp.seconds > 0.95 * lockstep.seconds
    assert balanced.seconds < 0.55 * lockstep.seconds


def test_in_lockstep_a_round_has_the_same_samples_with_other_shares() -> None:
    events = run(BSP(), STRAGGLER, iterations=20, balance=True)
    last = {event.pushed: event.samples for event in pushes(events)}
    assert last == {0: 40, 1: 40, 2: 40, 3: 16}
    assert [e.text for e in events if isinstance(e, Note)] == [
        "balanced: batches of 40 (rank 0), 40 (rank 1), 40 (rank 2), 16 (rank 3) samples from now on"
    ]
    assert [e.balance for e in events if isinstance(e, RunStarted)] == [True]


@given(name=names, cluster=clusters(), seed=st.integers(0, 999))
def test_every_sample_is_pushed_exactly_once_whoever_comes_and_goes(
    name: str, cluster: Cluster, seed: int
) -> None:
    cluster = msgspec.structs.replace(cluster, batch=cluster.batch + 1)
    done = sorted(
        work for e in pushes(run(PACED[name](), cluster, seed=seed, balance=True)) for work in e.work
    )
    at = 0
    for _, first, count in done:
        assert first == at
        at += count
    assert at == 8 * cluster.workers * cluster.batch


@given(name=names, cluster=clusters(), seed=st.integers(0, 999))
def test_a_summarised_balanced_run_comes_to_the_same_result(name: str, cluster: Cluster, seed: int) -> None:
    cluster = msgspec.structs.replace(cluster, batch=cluster.batch + 1)
    full, summed = (
        simulate(PACED[name](), cluster, iterations=8, seed=seed, balance=True, summarise=way).result()
        for way in (False, True)
    )
    assert full.waiting_share == pytest.approx(summed.waiting_share, abs=1e-12)
    rest = {"waiting_share": [], "bytes_sent_each": None}  # a sum does not tell who sent how much
    assert msgspec.structs.replace(full, **rest) == msgspec.structs.replace(summed, **rest)


def test_equal_workers_are_left_as_they_are() -> None:
    cluster = Cluster.from_flags(workers=4, compute_s=1.0, batch=8)
    for protocol in (BSP(), ASP()):
        plain = decisions(run(protocol, cluster, iterations=30))
        assert decisions(run(protocol, cluster, iterations=30, balance=True)) == plain


def test_after_a_death_the_others_keep_their_proportion() -> None:
    cluster = msgspec.structs.replace(STRAGGLER, event=(Membership(40.0, kill=0),))
    last = {e.pushed: e.samples for e in pushes(run(BSP(), cluster, iterations=60, balance=True)) if e.t < 60}
    assert last[1] + last[2] + last[3] == 3 * 34
    assert last[1] == pytest.approx(2.5 * last[3], abs=2)


@pytest.mark.parametrize(
    ("batch", "equal", "words"),
    [(1, False, "batch must be > 1, got 1"), (8, True, "--shards equal gives every worker the same")],
)
def test_what_cannot_be_balanced_is_refused(batch: int, equal: bool, words: str) -> None:
    cluster = Cluster.from_flags(workers=2, batch=batch)
    with pytest.raises(ConfigError, match=words):
        simulate(BSP(), cluster, iterations=2, balance=True, equal_shards=equal)


def test_a_cluster_taken_from_a_balanced_run_knows_who_was_slow(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.jsonl")
    simulate(BSP(), STRAGGLER, iterations=40, balance=True, trace=writer.write)
    writer.close()
    cluster = Cluster.from_run(tmp_path)
    assert cluster.batch == 34
    assert isinstance(cluster.compute, Recorded)
    means = [sum(times) / len(times) for times in cluster.compute.times_s]
    assert means == pytest.approx([1.0, 1.0, 1.0, 2.5])
