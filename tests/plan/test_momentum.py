"""Momentum against the exact recursion: a longer step alone promises too much, a later one does not."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.plan.staleness.arrivals import Flow
from paceline.plan.staleness.delays import Constant
from paceline.plan.staleness.discrete import decay_per_update
from paceline.plan.staleness.outlook import Direction, critical_step, predict


def exact_bound(momentum, staleness):
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if decay_per_update(middle, staleness, momentum) > 0 else (low, middle)
    return low


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_bound_is_within_five_per_cent_of_the_exact_one(momentum, workers):
    flow = Flow.ideal(workers, Constant())
    bound = critical_step(flow, 1.0, momentum)
    assert bound == pytest.approx(exact_bound(momentum, workers - 1), rel=0.05)


def test_the_first_approximation_alone_would_promise_too_much():
    exact = exact_bound(0.9, 3)
    first = (1 - 0.9) * np.pi / 2 / 3.5
    assert first > 1.25 * exact
    assert critical_step(Flow.ideal(4, Constant()), 1.0, 0.9) <= 1.01 * exact


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_the_rate_is_within_two_per_cent_of_the_exact_one(momentum, workers, share):
    step = share * exact_bound(momentum, workers - 1)
    outlook = predict(Flow.ideal(workers, Constant()), [Direction(1.0)], step, momentum=momentum)
    exact = decay_per_update(step, workers - 1, momentum)
    assert outlook.rate_per_update == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_one_worker_is_exact(momentum):
    flow = Flow.ideal(1, Constant())
    assert critical_step(flow, 1.0, momentum) == pytest.approx(2 * (1 + momentum))
    outlook = predict(flow, [Direction(1.0)], 0.2, momentum=momentum)
    assert outlook.rate_per_update == pytest.approx(decay_per_update(0.2, 0, momentum))
