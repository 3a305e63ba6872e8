"""Predictions against asynchronous training event by event, on a bowl with the real pacer."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.plan.staleness import Direction, from_cluster, predict
from paceline.plan.staleness.policies import PolicyStep, outlook
from paceline.sim import Cluster, Exponential, Lognormal
from plan.event_driven import Bowl, asynchronous, decay_of, mean_path

DELAYS = [Lognormal(1.0, 0.2), Lognormal(1.0, 0.5), Exponential(1.0, 0.5)]


def flow_of(cluster):
    return from_cluster(cluster, "test").crew.flow(cluster.workers)


@pytest.mark.parametrize("compute", DELAYS, ids=repr)
@pytest.mark.parametrize(("workers", "step_curvature"), [(4, 0.04), (10, 0.02), (20, 0.01)])
def test_error_decays_as_predicted_and_staleness_is_one_less_than_workers(compute, workers, step_curvature):
    cluster = Cluster(workers=workers, compute=compute)
    path, staleness = mean_path(cluster, step_curvature, cycles=10, runs=40)
    predicted = predict(flow_of(cluster), [Direction(1.0)], step_curvature)
    assert decay_of(path[4 * workers :], every=workers // 2) == pytest.approx(
        predicted.rate_per_update, rel=0.05
    )
    assert np.mean(staleness) == pytest.approx(workers - 1, rel=0.03)
    assert predicted.staleness == workers - 1


@pytest.mark.parametrize("compute", DELAYS, ids=repr)
def test_an_oscillating_error_decays_as_predicted(compute):
    cluster = Cluster(workers=10, compute=compute)
    path, _ = mean_path(cluster, 0.1, cycles=10, runs=100)
    predicted = predict(flow_of(cluster), [Direction(1.0)], 0.1)
    assert decay_of(path[40:], every=2) == pytest.approx(predicted.rate_per_update, rel=0.15)


def test_unlike_workers_decay_as_predicted():
    cluster = Cluster(workers=8, compute=Lognormal(1.0, 0.3), slow={6: 2.0, 7: 4.0})
    path, staleness = mean_path(cluster, 0.03, cycles=8, runs=60)
    predicted = predict(flow_of(cluster), [Direction(1.0)], 0.03)
    assert decay_of(path[24:], every=4) == pytest.approx(predicted.rate_per_update, rel=0.05)
    assert np.mean(staleness) == pytest.approx(7, rel=0.05)


@pytest.mark.parametrize("compute", DELAYS, ids=repr)
@pytest.mark.parametrize("step", [0.02, 0.1])
def test_noise_keeps_the_loss_at_the_predicted_floor(compute, step):
    cluster = Cluster(workers=10, compute=compute)
    bowl = Bowl(step, 1.0, 1.0, cluster.workers)
    asynchronous(cluster, 5, 3000.0, bowl.push, bowl.read)
    excess = np.mean(np.square(bowl.values[2000:])) / 2
    predicted = predict(flow_of(cluster), [Direction(1.0, noise=1.0)], step)
    assert predicted.floor == pytest.approx(excess, rel=0.1)


@pytest.mark.parametrize("compute", DELAYS, ids=repr)
def test_below_the_bound_the_error_dies_out_and_above_it_grows(compute):
    cluster = Cluster(workers=10, compute=compute)
    critical = predict(flow_of(cluster), [Direction(1.0)], 0.1).critical / 9.5
    ends = []
    for share in (0.85, 1.15):
        bowl = Bowl(share * critical, 1.0, 0.0, cluster.workers)
        asynchronous(cluster, 0, 150.0, bowl.push, bowl.read)
        ends.append(np.abs(bowl.values[-100:]).max())
    assert ends[0] < 1e-3
    assert ends[1] > 1e3


def test_the_advised_number_of_workers_gets_there_soonest():
    def cycles_to(error, workers):
        """How long both ends of the spectrum take, in the mean over runs."""
        cluster, size = Cluster(workers=workers, compute=Lognormal(1.0, 0.2)), 0.0
        for step_curvature in (0.02, 0.2):
            squares = 0.0
            for seed in range(10):
                bowl = Bowl(step_curvature, 1.0, 0.0, workers)
                asynchronous(cluster, seed, 100.0, bowl.push, bowl.read)
                squares += np.square(bowl.values[: 80 * workers]) / 10
            size += np.sqrt(squares)
        return np.flatnonzero(size > error)[-1] / workers

    crew = from_cluster(Cluster(workers=10, compute=Lognormal(1.0, 0.2)), "test").crew
    spectrum, counts = [Direction(1.0), Direction(10.0)], (2, 5, 8)
    rates = {m: outlook(crew, spectrum, PolicyStep(0.02), m).rate_per_s for m in counts}
    taken = {m: cycles_to(0.03, m) for m in counts}
    assert max(counts, key=rates.__getitem__) == min(counts, key=taken.__getitem__) == 5
