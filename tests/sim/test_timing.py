"""Times belong to (seed, worker) and to nothing else."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.sim import (
    Cluster,
    Drift,
    Exponential,
    Fixed,
    Group,
    HalfNormal,
    Link,
    Lognormal,
    Normal,
    Pareto,
    Recorded,
    Stall,
    Timing,
    Transient,
)
from paceline.sim.compute import ComputeTime
from sim.clusters import clusters


def ask(cluster: Cluster, seed: int, order: list[int]) -> dict[int, list[float]]:
    """Each worker's times, asked for in that order, an iteration beginning when the last one ended."""
    timing = Timing(cluster, seed)
    times: dict[int, list[float]] = {worker: [] for worker in range(cluster.workers)}
    now = dict.fromkeys(times, 0.0)
    for worker in order:
        times[worker].append(timing.compute_s(worker, now[worker]))
        now[worker] += times[worker][-1]
    return times


@given(cluster=clusters(churn=False), seed=st.integers(0, 9999), shuffle=st.randoms(use_true_random=False))
def test_a_workers_times_do_not_depend_on_the_order_of_asking(
    cluster: Cluster, seed: int, shuffle: Random
) -> None:
    order = [worker for worker in range(cluster.workers) for _ in range(80)]
    in_turn = ask(cluster, seed, order)
    shuffle.shuffle(order)
    assert ask(cluster, seed, order) == in_turn


def test_a_workers_times_do_not_depend_on_how_many_there_are() -> None:
    few, many = (Cluster(workers=n, compute=Lognormal(1.0)) for n in (2, 20))
    assert ask(few, 3, [0, 1] * 100)[1] == ask(many, 3, [1] * 100)[1]


def test_workers_and_seeds_have_streams_of_their_own() -> None:
    cluster = Cluster(workers=2, compute=Lognormal(1.0))
    times = ask(cluster, 3, [0, 1])
    assert times[0] != times[1]
    assert ask(cluster, 4, [0, 1])[0] != times[0]


def test_slow_phases_stay_where_they_are_whenever_one_asks() -> None:
    cluster = Cluster(workers=1, compute=Fixed(1.0), transient=Transient(2.0, 3.0, 3.0))
    moments = [0.5 * n for n in range(400)]
    often, rarely = Timing(cluster, 1), Timing(cluster, 1)
    answers = {now: often.compute_s(0, now) for now in reversed(moments)}
    assert {now: rarely.compute_s(0, now) for now in moments[::7]} == {
        now: answers[now] for now in moments[::7]
    }


def test_an_iteration_is_stretched_by_exactly_the_slow_time_it_meets() -> None:
    cluster = Cluster(workers=1, compute=Fixed(1.0), transient=Transient(2.0, 3.0, 3.0))
    timing = Timing(cluster, 1)
    moments = [0.05 * n for n in range(4000)]
    times = [timing.compute_s(0, now) for now in moments]
    assert {1.0, 2.0} <= {round(took, 9) for took in times}
    assert all(1.0 - 1e-9 <= took <= 2.0 + 1e-9 for took in times)
    ends = [now + took for now, took in zip(moments, times, strict=True)]
    assert all(later >= sooner - 1e-9 for sooner, later in pairwise(ends))  # who begins first ends first


def test_slow_phases_take_their_share_of_time_from_the_very_start() -> None:
    """Factor 3, slow a quarter of the time: on average 1.5 times slower wherever one looks."""
    cluster = Cluster(workers=4000, compute=Fixed(0.001), transient=Transient(3.0, 2.0, 6.0))
    timing = Timing(cluster, 5)
    for now in (0.0, 1.0, 100.0):
        mean = sum(timing.compute_s(worker, now) for worker in range(4000)) / 4000
        assert mean == pytest.approx(0.0015, rel=0.05)


@pytest.mark.parametrize(
    ("model", "mean", "spread"),
    [
        (Fixed(2.0), 2.0, 0.0),
        (Normal(2.0, 0.2), 2.0, 0.2),
        (Lognormal(2.0, 0.5), 2.0, 0.5),
        (Exponential(2.0), 2.0, 1.0),
        (Exponential(2.0, 0.25), 2.0, 0.25),
        (HalfNormal(2.0), 2.0, 0.1),
        (HalfNormal(2.0, 0.75), 2.0, 0.75),
        (Recorded("r", ((1.0, 3.0),)), 2.0, 0.5),
    ],
)
def test_models_have_the_mean_and_the_spread_they_state(
    model: ComputeTime, mean: float, spread: float
) -> None:
    times = ask(Cluster(workers=1, compute=model), 1, [0] * 20000)[0]
    found = sum(times) / len(times)
    assert found == pytest.approx(mean, rel=0.03)
    assert (sum((t - found) ** 2 for t in times) / len(times)) ** 0.5 == pytest.approx(
        spread * mean, rel=0.05, abs=1e-9
    )
    assert min(times) > 0


def test_a_half_normal_delay_comes_on_top_of_a_least_time() -> None:
    """Spread 0.3: a delay with mean 0.3/0.7555, and the median of a half-normal one."""
    times = sorted(ask(Cluster(workers=1, compute=HalfNormal(1.0, 0.3)), 1, [0] * 20000)[0])
    delay = 0.3 / math.sqrt(math.pi / 2 - 1)
    assert times[0] == pytest.approx(1 - delay, abs=1e-3)
    assert times[10000] - (1 - delay) == pytest.approx(delay * math.sqrt(math.pi / 2) * 0.67449, rel=0.03)


@pytest.mark.parametrize("factor", [3.0, 0.5])
def test_a_drift_goes_in_a_straight_line_and_stays_where_it_ends(factor: float) -> None:
    timing = Timing(Cluster(workers=1, compute=Fixed(2.0), drift=Drift(factor, 100.0)), 0)
    for now, share in ((0.0, 0.0), (25.0, 0.25), (100.0, 1.0), (1e6, 1.0)):
        assert timing.compute_s(0, now) == pytest.approx(2.0 * (1 + share * (factor - 1)))


def test_a_drift_is_drawn_out_further_by_slow_phases_and_is_a_groups_own_affair() -> None:
    groups = (Group(1), Group(1, drift=Drift(4.0, 10.0)), Group(1, slow=2.0, drift=Drift(4.0, 10.0)))
    timing = Timing(Cluster(workers=3, compute=Fixed(1.0), group=groups), 0)
    assert [timing.compute_s(rank, 10.0) for rank in range(3)] == [1.0, 4.0, 8.0]
    slow = Transient(2.0, 1e9, 1e-9)
    both = Timing(Cluster(workers=1, compute=Fixed(1.0), transient=slow, drift=Drift(4.0, 10.0)), 0)
    assert both.compute_s(0, 10.0) == pytest.approx(8.0)


def test_as_many_iterations_straggle_as_stated() -> None:
    times = ask(Cluster(workers=1, compute=Pareto(1.0, 0.0, 0.1, 2.0)), 1, [0] * 20000)[0]
    straggling = [t for t in times if t > 1.0 + 1e-9]
    assert len(straggling) / len(times) == pytest.approx(0.1, rel=0.1)
    assert sum(t > 2.0 for t in straggling) / len(straggling) == pytest.approx(0.25, rel=0.1)


def test_every_rank_gets_the_slowness_and_link_of_its_group_and_its_own() -> None:
    cluster = Cluster(
        workers=4,
        compute=Fixed(1.0),
        model_bytes=1000,
        link=Link(0.5),
        group=(Group(2), Group(2, Fixed(10.0), slow=2.0, link=Link(0.0, 100.0))),
        slow={1: 3.0, 3: 3.0},
        links={3: Link(0.25)},
    )
    timing = Timing(cluster, 0)
    assert [timing.compute_s(worker, 0.0) for worker in range(4)] == [1.0, 3.0, 20.0, 60.0]
    assert [timing.push_s(worker) for worker in range(4)] == [0.5, 0.5, 10.0, 0.25]
    assert [timing.pull_s(worker) for worker in range(4)] == [0.5, 0.5, 10.0, 0.25]


def test_recorded_times_are_drawn_from_the_ranks_own_record() -> None:
    cluster = Cluster(workers=3, compute=Recorded("r", ((1.0, 2.0), (), (5.0,))))
    times = ask(cluster, 1, [0, 1, 2] * 50)
    assert [set(times[worker]) for worker in range(3)] == [{1.0, 2.0}, {5.0}, {1.0, 2.0}]


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed must be >= 0, got -1"):
        Timing(Cluster(workers=1), -1)


@given(
    rank=st.integers(0, 4),
    length_s=st.floats(0.1, 2.0),
    gap_s=st.floats(0.1, 3.0),
    work=st.floats(0.01, 20.0),
    now=st.floats(0.0, 60.0),
)
def test_work_stands_still_in_a_ranks_stalls_and_in_no_others(
    rank: int, length_s: float, gap_s: float, work: float, now: float
) -> None:
    """Beside a clock that counts the time in which nobody says that the rank stands still."""
    stall = Stall(every_s=length_s + gap_s, length_s=length_s)
    took = Timing(Cluster(workers=5, compute=Fixed(work), stall=stall), 0).compute_s(rank, now)
    ticks = np.linspace(now, now + took, 20_001)
    still = np.mean([stall.who(float(t), 5) == rank for t in ticks]) * took
    assert took - still == pytest.approx(work, abs=took / 1000)


def test_ranks_but_the_first_take_turns_to_stand_still() -> None:
    stall = Stall(every_s=8.0, length_s=2.0)
    assert [stall.who(8.0 * n + 1.0, 4) for n in range(6)] == [None, 1, 2, 3, 1, 2]
    assert [stall.who(t, 4) for t in (7.9, 8.0, 9.9, 10.0)] == [None, 1, 1, None]
    assert stall.who(9.0, 1) is None


@pytest.mark.parametrize(("every_s", "length_s"), [(1.0, 2.0), (2.0, 0.0), (math.inf, 1.0)])
def test_stalls_that_would_overlap_or_last_no_time_are_refused(every_s: float, length_s: float) -> None:
    with pytest.raises(ConfigError, match="a stall needs 0 < length_s <= every_s"):
        Stall(every_s=every_s, length_s=length_s)
