"""How often gradients arrive: Little's law, mean-value analysis, unlike workers."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.plan.staleness.arrivals import WorkerSet, queued_rate, saturation
from paceline.plan.staleness.delays import Constant, Samples
from paceline.protocols import PACED
from paceline.sim import Cluster, Exponential, simulate


def test_one_worker_never_queues():
    assert queued_rate(1, 0.9, 0.1) == pytest.approx(1.0)


def test_two_workers_queue_as_the_textbook_says():
    # One worker keeps the resource busy a tenth of the time, so a second waits 0.01 s in the mean.
    assert queued_rate(2, 0.9, 0.1) == pytest.approx(2 / 1.01)


def test_queueing_never_beats_the_cap_and_reaches_it():
    for workers in (1, 5, 10, 20, 100):
        unqueued = workers / (0.9 + 0.1)
        assert queued_rate(workers, 0.9, 0.1) <= min(unqueued, 1 / 0.1) + 1e-12
    assert queued_rate(100, 0.9, 0.1) == pytest.approx(10.0)
    assert saturation(0.9, 0.1) == pytest.approx(10.0)


def test_without_a_shared_resource_everybody_has_the_own_rate():
    crew = WorkerSet((Constant(1.0), Constant(2.0), Constant(4.0)))
    assert crew.flow(3).per_s == pytest.approx(1.75)
    assert crew.most == 3


@pytest.mark.parametrize("shared_s", [0.0, 0.05, 0.5])
def test_littles_law_holds_for_the_delay_of_arriving_gradients(shared_s):
    crew = WorkerSet((Samples((0.8, 1.2)), Samples((2.0,)), Samples((0.5, 0.7)), Samples((0.9,))), shared_s)
    for workers in range(1, 5):
        flow = crew.flow(workers)
        assert flow.law.mean * flow.per_s == pytest.approx(workers, rel=1e-6)


def test_the_delay_of_a_gradient_is_not_length_biased():
    flow = WorkerSet((Samples((1.0,)), Samples((3.0,)))).flow(2)
    assert flow.law.mean == pytest.approx((3 * 1.0 + 1 * 3.0) / 4)  # three of four gradients are quick


@pytest.mark.parametrize("apply_s", [0.02, 0.08, 0.15])
def test_arrivals_at_a_busy_store_are_as_simulated(apply_s):
    cluster = Cluster(workers=10, compute=Exponential(1.0, 1.0), apply_s=apply_s)
    tally = simulate(PACED["asp"](), cluster, iterations=400, summarise=True)
    rate = queued_rate(10, 1.0, apply_s)
    assert rate == pytest.approx(tally.pushes / tally.now, rel=0.06)


def test_a_shared_time_beyond_the_cycle_is_refused():
    with pytest.raises(ConfigError, match="give less"):
        WorkerSet((Constant(1.0),), 1.5)
