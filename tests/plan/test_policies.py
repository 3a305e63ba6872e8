"""What is advised: published optima, and what advice must never do."""

from __future__ import annotations

from itertools import pairwise
from math import e, exp, inf, log, pi
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.staleness.arrivals import Flow, WorkerSet
from paceline.plan.staleness.delays import Constant, Gamma, Samples
from paceline.plan.staleness.discrete import decay_per_update
from paceline.plan.staleness.outlook import Direction, hitting_s, predict
from paceline.plan.staleness.policies import (
    PolicyStep,
    best,
    group_survey,
    is_worth_it,
    learning_rates,
    lockstep,
    longest_s,
    survey,
)
from paceline.plan.staleness.thresholds import best_threshold, threshold, thresholds

EXPONENTIAL = Samples(tuple(-log(1 - (i + 0.5) / 4000) for i in range(4000)))


def like(workers, cycle_s=1.0, shared_s=0.0):
    return WorkerSet((Constant(cycle_s),) * workers, shared_s)


def surveyed(spectrum, lr=0.01, workers=20, cycle_s=1.0):
    return survey(like(workers, cycle_s), [Direction(float(c)) for c in spectrum], PolicyStep(lr))


# -- active workers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spectrum", "workers", "rate", "unstable"),
    [((1, 10), 13, 0.1502, 17), ((10,), 5, 0.9612, 17), ((1, 20), 7, None, 9)],
)
def test_published_best_number_of_workers(spectrum, workers, rate, unstable):
    outlooks = surveyed(spectrum)
    chosen = best(outlooks)
    assert chosen is not None
    assert chosen.workers == workers
    assert rate is None or chosen.rate_per_s == pytest.approx(rate, abs=5e-5)
    assert min(o.workers for o in outlooks if not o.stable) == unstable


def test_published_rates_around_the_best():
    rates = {o.workers: o.rate_per_s for o in surveyed((1, 10))}
    assert rates[1] == pytest.approx(0.01005, abs=5e-6)
    assert rates[14] == pytest.approx(0.1114, abs=5e-5)


@pytest.mark.parametrize("lr", [0.005, 0.01, 0.03])
def test_rate_rises_then_falls_with_the_number_of_workers(lr):
    rates = [o.rate_per_s for o in surveyed((10,), lr)]
    falls = [b < a for a, b in pairwise(rates)]
    assert falls == sorted(falls)


def test_sharper_curvature_or_longer_steps_never_ask_for_more_workers():
    def chosen(spectrum, lr):
        outlook = best(surveyed(spectrum, lr))
        assert outlook is not None
        return outlook.workers

    by_curvature = [chosen((1, c), 0.01) for c in (5, 10, 15, 20, 40)]
    by_step = [chosen((1, 10), lr) for lr in (0.005, 0.01, 0.015, 0.02, 0.04)]
    assert by_curvature == sorted(by_curvature, reverse=True)
    assert by_step == sorted(by_step, reverse=True)


@pytest.mark.parametrize("factor", [0.01, 3.0])
def test_the_unit_of_time_does_not_change_the_choice(factor):
    plain, scaled = best(surveyed((1, 10))), best(surveyed((1, 10), cycle_s=factor))
    assert plain is not None
    assert scaled is not None
    assert scaled.workers == plain.workers
    assert scaled.rate_per_s == pytest.approx(plain.rate_per_s / factor)


@given(st.floats(1e-3, 0.5), st.floats(0.1, 50.0), st.integers(1, 12), st.floats(0.3, 1.0))
def test_what_is_unstable_is_never_advised(lr, curvature, workers, safety):
    chosen = best(survey(like(workers), [Direction(curvature)], PolicyStep(lr)), safety)
    if chosen is None:
        assert lr * curvature / 2 > safety * 0.999
    else:
        assert chosen.load < chosen.critical
        assert chosen.margin <= safety


def test_with_one_worker_one_is_advised():
    chosen = best(surveyed((1, 10), workers=1))
    assert chosen is not None
    assert chosen.workers == 1


def test_no_more_workers_are_advised_than_saturate_the_store():
    crew = like(40, cycle_s=1.0, shared_s=0.1)
    outlooks = survey(crew, [Direction(1.0)], PolicyStep(0.01))
    assert outlooks[-1].workers == 10
    chosen = best(outlooks)
    assert chosen is not None
    assert chosen.workers <= 10


def test_the_slowest_workers_are_parked_first():
    crew = WorkerSet((Constant(5.0), Constant(1.0), Constant(2.0)))
    assert crew.ranks == (1, 2, 0)
    assert crew.flow(2).per_s == pytest.approx(1.5)
    for lr, workers in ((0.002, 3), (0.02, 2)):  # with room even the slow one helps
        chosen = best(survey(crew, [Direction(10.0)], PolicyStep(lr)))
        assert chosen is not None
        assert chosen.workers == workers


def test_time_to_target_is_preferred_to_the_bare_rate():
    noisy = [Direction(1.0, noise=1.0, excess=1.0)]
    outlooks = survey(like(40), noisy, PolicyStep(0.02), target=0.0068)
    by_time, by_rate = best(outlooks), max(outlooks, key=lambda o: o.rate_per_s)
    assert by_time is not None
    assert by_time.seconds_to_target is not None
    assert by_time.seconds_to_target < (by_rate.seconds_to_target or inf)
    assert by_time.workers < by_rate.workers


def test_a_thousand_workers_are_surveyed_in_few_steps():
    assert len(survey(like(1000), [Direction(1.0)], PolicyStep(0.0001))) < 120


class Promised(NamedTuple):
    """What a change is judged by."""

    rate_per_s: float
    seconds_to_target: float | None = None
    margin: float = 0.5


@pytest.mark.parametrize(
    ("new", "old", "worth"),
    [
        (Promised(1.0499), Promised(1.0), False),
        (Promised(1.0501), Promised(1.0), True),
        (Promised(0.5, 95.01), Promised(1.0, 100.0), False),
        (Promised(0.5, 94.99), Promised(1.0, 100.0), True),  # the time counts, where both have one
        (Promised(9.0, 99.0), Promised(1.0, 100.0), False),
        (Promised(1.051, 99.0), Promised(1.0), True),
        (Promised(1.0499), Promised(1.0, 100.0), False),
        (Promised(0.1), Promised(1.0, margin=0.71), True),  # back within the margin, at any price
        (Promised(0.1), Promised(1.0, margin=0.7), False),
        (Promised(0.1), Promised(0.0), True),
    ],
)
def test_a_change_is_worth_it_from_five_per_cent_on(new, old, worth):
    assert is_worth_it(new, old, safety=0.7) is worth


# -- learning rates ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 5, 20])
def test_learning_rates_of_a_constant_delay(workers):
    rates = learning_rates(Flow.ideal(workers, Constant()), 10.0, PolicyStep(1.0))
    assert rates.critical == pytest.approx(pi / 2 / (10 * (workers - 0.5)), rel=0.05)
    assert rates.safe == pytest.approx(0.5 * rates.critical)
    assert rates.smooth == pytest.approx(1 / (e * 10 * (workers - 0.5)))


def test_variable_delays_allow_more_but_safe_does_not_count_on_it():
    rates = learning_rates(Flow.ideal(10, Gamma(4.0)), 10.0, PolicyStep(1.0))
    assert rates.critical > 1.4 * rates.critical_constant
    assert rates.safe == pytest.approx(0.5 * rates.critical_constant)


def test_the_bound_is_off_by_nothing():
    flow = Flow.ideal(6, Gamma(4.0))
    lr = learning_rates(flow, 10.0, PolicyStep(1.0)).critical
    assert predict(flow, [Direction(10.0)], 0.999 * lr).stable
    assert not predict(flow, [Direction(10.0)], 1.001 * lr).stable


def test_weighting_by_the_mean_makes_the_bound_almost_free_of_the_number_of_workers():
    by_mean = [
        learning_rates(Flow.ideal(m, Constant()), 10.0, PolicyStep(1.0, weighting="mean")).critical
        for m in (4, 64)
    ]
    assert by_mean[0] == pytest.approx(by_mean[1], rel=0.15)
    halves = learning_rates(Flow.ideal(4, Constant()), 10.0, PolicyStep(1.0, weighting=0.5)).critical
    whole = learning_rates(Flow.ideal(4, Constant()), 10.0, PolicyStep(1.0, weighting="sum")).critical
    assert halves == pytest.approx(2 * whole)


# -- groups, lockstep, thresholds ----------------------------------------------------------------


def test_published_rate_of_groups():
    outlook = predict(Flow.ideal(20, Gamma(4.0)), [Direction(1.0)], 0.06, group=5)
    assert outlook.rate_per_s == pytest.approx(0.358, rel=0.005)  # simulated; 0.365 without the half step


def test_a_group_averages_noise():
    noisy = [Direction(1.0, noise=1.0)]
    groups = group_survey(Flow.ideal(8, Gamma(4.0)), noisy, PolicyStep(0.01, weighting="mean"))
    assert sorted(groups) == [1, 2, 3, 4, 5, 6, 7, 8]
    floors = [groups[size].floor for size in sorted(groups)]
    assert floors == sorted(floors, reverse=True)


def test_lockstep_takes_rounds_of_the_longest_cycle_and_has_no_staleness():
    crew = WorkerSet((Samples((1.0, 3.0)), Samples((2.0,))))
    assert longest_s(crew.cycles) == pytest.approx(2.5)
    outlook = lockstep(crew, [Direction(1.0, noise=1.0)], PolicyStep(0.1, weighting="mean"))
    assert outlook.rate_per_s == pytest.approx(-log(0.9) / 2.5)
    assert outlook.floor == pytest.approx(0.1 / 4 * (1 / 2) * 2 / 1.9)
    assert outlook.staleness == 0


@pytest.mark.parametrize(("restart", "rate"), [(False, 0.0802), (True, 0.2100)])
def test_published_rates_with_a_threshold(restart, rate):
    flow = Flow.ideal(20, EXPONENTIAL)
    found = threshold(flow, 0.5, [Direction(1.0)], PolicyStep(0.01), restart)
    assert found is not None
    assert found.rate_per_s == pytest.approx(rate, abs=1e-4)
    assert found.kept == pytest.approx(1 - exp(-0.5), abs=1e-3)
    assert found.updates == pytest.approx(
        10 if restart else 10 * found.kept, rel=1e-3
    )  # of those that are kept


def test_a_threshold_is_advised_only_where_it_helps():
    flow = Flow.ideal(20, Samples.of(EXPONENTIAL.times))
    calm = best_threshold(thresholds(flow, [Direction(1.0)], PolicyStep(0.001)))
    assert calm is not None
    assert calm.kept == 1
    straggling = Samples.of([*np.linspace(0.9, 1.1, 90), *np.linspace(20.0, 40.0, 10)])
    wild = best_threshold(thresholds(Flow.ideal(20, straggling), [Direction(10.0)], PolicyStep(0.004)), 0.7)
    assert wild is not None
    assert wild.kept < 1


# -- time to target ------------------------------------------------------------------------------


def test_hitting_time_of_one_direction_is_the_closed_form():
    assert hitting_s([2.0], [0.1], [0.3], 0.5) == pytest.approx(log(1.9 / 0.4) / 0.6)


def test_hitting_time_of_a_spectrum_is_when_the_sum_gets_there():
    t = hitting_s([1.0, 1.0], [0.05, 0.0], [0.1, 1.0], 0.3)
    assert 0.05 + 0.95 * exp(-0.2 * t) + exp(-2 * t) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("excess", "floor", "rate", "target", "expected"),
    [
        (1.0, 0.2, 0.1, 0.2, inf),
        (1.0, 0.0, -0.1, 0.5, inf),
        (0.1, 0.0, 0.1, 0.5, 0.0),
        (1.0, inf, 0.1, 0.5, inf),
    ],
)
def test_hitting_time_at_the_edges(excess, floor, rate, target, expected):
    assert hitting_s([excess], [floor], [rate], target) == expected


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("gradients", [1.0, 3.0])
def test_a_push_that_sums_gradients_up_stands_a_learning_rate_so_much_smaller(workers, gradients):
    """Exactly, round robin: an update of `gradients` steps, computed workers - 1 updates ago."""
    step = PolicyStep(1.0, weighting="sum", gradients=gradients)
    bound = learning_rates(Flow.ideal(workers, Constant()), 10.0, step).critical
    assert decay_per_update(0.98 * bound * gradients * 10.0, workers - 1) > 0
    assert decay_per_update(1.02 * bound * gradients * 10.0, workers - 1) < 0
