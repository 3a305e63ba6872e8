"""What the protocols promise holds in simulated runs, with workers that die, join and come back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.protocols import Pacing
from paceline.protocols.paced.asp import ASP
from paceline.protocols.paced.bsp import BSP
from paceline.protocols.paced.dssp import DSSP, Preset
from paceline.protocols.paced.ssp import SSP
from paceline.sim import Cluster
from sim.clusters import clusters, decisions, gaps_at_start, run

seeds = st.integers(0, 9999)


@given(cluster=clusters(), seed=seeds, staleness=st.integers(0, 4))
def test_under_ssp_an_iteration_begins_at_most_staleness_ahead(
    cluster: Cluster, seed: int, staleness: int
) -> None:
    assert max(gaps_at_start(run(SSP(staleness), cluster, seed=seed, iterations=20))) <= staleness


@given(
    cluster=clusters(),
    seed=seeds,
    lower=st.integers(0, 2),
    more=st.integers(0, 4),
    preset=st.sampled_from(["bounded", "bounded_eager"]),
)
def test_under_bounded_dssp_an_iteration_begins_at_most_upper_ahead(
    cluster: Cluster, seed: int, lower: int, more: int, preset: Preset
) -> None:
    events = run(DSSP(lower, lower + more, preset), cluster, seed=seed, iterations=20)
    assert max(gaps_at_start(events)) <= lower + more


@given(cluster=clusters(), seed=seeds)
def test_under_bsp_nobody_begins_ahead(cluster: Cluster, seed: int) -> None:
    assert max(gaps_at_start(run(BSP(), cluster, seed=seed))) == 0


@given(cluster=clusters(), seed=seeds)
def test_the_reported_gap_is_the_largest_with_which_an_iteration_began(cluster: Cluster, seed: int) -> None:
    events = run(ASP(), cluster, seed=seed)
    assert max(gaps_at_start(events)) == max(event.gap for event in decisions(events))


def releases(protocol: Pacing, cluster: Cluster, seed: int) -> list[tuple[float, tuple[int, ...]]]:
    """Who was released when."""
    return [(e.t, e.release) for e in decisions(run(protocol, cluster, seed=seed)) if e.release]


@given(cluster=clusters(churn=False), seed=seeds)
def test_ssp_without_staleness_releases_exactly_as_bsp(cluster: Cluster, seed: int) -> None:
    assert releases(SSP(0), cluster, seed) == releases(BSP(), cluster, seed)


@given(cluster=clusters(), seed=seeds)
def test_dssp_without_a_range_releases_exactly_as_ssp(cluster: Cluster, seed: int) -> None:
    assert releases(DSSP(2, 2), cluster, seed) == releases(SSP(2), cluster, seed)


@given(cluster=clusters(), seed=seeds)
def test_ssp_with_endless_staleness_releases_exactly_as_asp(cluster: Cluster, seed: int) -> None:
    assert releases(SSP(10**6), cluster, seed) == releases(ASP(), cluster, seed)
