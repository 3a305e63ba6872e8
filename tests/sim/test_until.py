"""Runs that stop at a time instead of after so much work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, RunError
from paceline.protocols import PACED
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.sim import Cluster, Fixed, Membership, simulate
from paceline.trace.events import RunEnded, WorkerJoined, WorkerLeft
from sim.clusters import clusters, pushes, run

ONE_SLOW = Cluster.from_flags(workers=2, compute_s=1.0, slow={1: 4.0})


def test_a_run_stops_at_its_time_and_tells_how_far_each_worker_got() -> None:
    tally = simulate(ASP(), ONE_SLOW, iterations=1000, until_s=10.5)
    assert tally.clock == {0: 10, 1: 2}
    assert tally.result().seconds == 10.5
    assert tally.result().status == "finished"


def test_what_happens_at_the_very_moment_still_counts() -> None:
    assert simulate(ASP(), ONE_SLOW, iterations=1000, until_s=8.0).clock == {0: 8, 1: 2}


def test_a_worker_that_waits_when_the_run_stops_has_waited_until_then() -> None:
    for summarise in (False, True):
        ran = simulate(BSP(), ONE_SLOW, iterations=1000, until_s=10.0, summarise=summarise)
        assert ran.result().waiting_share == [pytest.approx(0.7), 0.0]  # 3 + 3 + 1 seconds of 10


def test_a_run_that_is_done_before_ends_when_it_is_done() -> None:
    assert simulate(ASP(), ONE_SLOW, iterations=5, until_s=1e6).result() == (
        simulate(ASP(), ONE_SLOW, iterations=5).result()
    )


@given(name=st.sampled_from(sorted(PACED)), cluster=clusters(), seed=st.integers(0, 9999))
def test_a_stopped_run_is_the_beginning_of_the_whole_one(name: str, cluster: Cluster, seed: int) -> None:
    whole, stopped = (run(PACED[name](), cluster, seed=seed, until_s=until) for until in (None, 6.0))
    assert pushes(stopped) == [event for event in pushes(whole) if event.t <= 6.0]
    assert isinstance(stopped[-1], RunEnded)
    assert stopped[-1].t <= 6.0
    joined = [event.worker for event in stopped if isinstance(event, WorkerJoined)]
    assert sorted(joined) == sorted(event.worker for event in stopped if isinstance(event, WorkerLeft))


def test_a_run_may_stop_while_its_only_worker_is_away_but_not_when_it_is_lost_for_good() -> None:
    lost, back = Membership(2.5, kill=0), Membership(9.0, join=0)
    away = Cluster(workers=1, compute=Fixed(1.0), event=(lost, back))
    assert simulate(ASP(), away, iterations=5, until_s=6.0).result().seconds == 6.0
    gone = Cluster(workers=1, compute=Fixed(1.0), event=(lost,))
    with pytest.raises(RunError, match="all workers are lost"):
        simulate(ASP(), gone, iterations=5, until_s=6.0)


def test_progress_follows_the_time() -> None:
    shares: list[float] = []
    simulate(ASP(), Cluster(workers=100), iterations=10**6, until_s=50.0, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("until_s", [0.0, -1.0, float("inf")])
def test_a_run_until_never_is_refused(until_s: float) -> None:
    with pytest.raises(ConfigError, match="until_s must be > 0, got"):
        simulate(ASP(), ONE_SLOW, iterations=1, until_s=until_s)
