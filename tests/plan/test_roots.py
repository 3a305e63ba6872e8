"""Characteristic roots: the published tables, exact recursions, and what no delay law may break."""

from __future__ import annotations

from math import e, inf, pi, sin, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.staleness.delays import (
    Constant,
    DelayLaw,
    Gamma,
    Grouped,
    Mixture,
    Samples,
    ShiftedExponential,
    Smeared,
    pool,
)
from paceline.plan.staleness.discrete import decay_per_update
from paceline.plan.staleness.roots import (
    FAR,
    SAFE_LOAD,
    critical_load,
    decay,
    dominant_root,
    roots_right_of,
    smooth_load,
)

CONSTANT = [
    (0.05, 0.052706),
    (0.1, 0.111833),
    (0.2, 0.259171),
    (0.3, 0.489402),
    (1 / e, 1.0),
    (0.5, 0.794024),
    (1.0, 0.318132),
    (1.5, 0.032784),
    (pi / 2, 0.0),
    (1.7, -0.056347),
]
LAWS: list[DelayLaw] = [
    Constant(2.0),
    Gamma(0.5),
    Gamma(4.0, 3.0),
    ShiftedExponential(0.0),
    ShiftedExponential(0.6, 0.2),
    Samples((0.2, 1.0, 3.0)),
    Mixture(((1.0, Gamma(3.0)), (2.0, Constant(4.0)))),
    Grouped(Gamma(2.0), 4, 0.1),
    Smeared(ShiftedExponential(0.5), 0.9, 0.2),
]
times = st.lists(st.floats(0.01, 30.0), min_size=1, max_size=6)


@pytest.mark.parametrize(("load", "rate"), CONSTANT)
def test_constant_delay_decays_as_lamberts_function_says(load, rate):
    assert decay(load, Constant()) == pytest.approx(rate, abs=6e-7)


@pytest.mark.parametrize(("load", "rate"), CONSTANT)
def test_the_general_solver_agrees_with_the_closed_form_for_a_constant_delay(load, rate):
    assert decay(load, Samples((1.0,))) == pytest.approx(rate, abs=6e-7)


@pytest.mark.parametrize("load", [0.05, 0.2, 0.249, 0.26, 1.0, 10.0])
@pytest.mark.parametrize("law", [Gamma(1.0), ShiftedExponential(0.0)])
def test_exponential_delay_solves_a_quadratic(law, load):
    expected = 0.5 - sqrt(0.25 - load) if load < 0.25 else 0.5
    assert decay(load, law) == pytest.approx(expected, rel=1e-6)
    assert critical_load(law) == inf


@pytest.mark.parametrize("load", [0.1, 0.5, 1.0, 1.5])
def test_gamma_of_great_shape_is_a_constant_delay(load):
    assert decay(load, Gamma(1e6)) == pytest.approx(decay(load, Constant()), abs=1e-5)
    assert critical_load(Gamma(1e6)) == pytest.approx(pi / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "bound"), [(2, 4.0), (3, 2.667), (4, 2.274), (8, 1.858), (16, 1.702), (1, inf), (0.5, inf)]
)
def test_gamma_bounds(shape, bound):
    law = Gamma(shape)
    assert critical_load(law) == pytest.approx(bound, rel=3e-4)
    assert critical_load(Mixture(((1.0, law),))) == pytest.approx(critical_load(law))  # found by search


def test_gamma_of_many_samples_behaves_as_its_law():
    law = Samples.of(np.random.default_rng(0).gamma(4.0, 0.25, 50_000).tolist())
    assert critical_load(law) == pytest.approx(critical_load(Gamma(4.0)), rel=0.02)
    assert decay(0.2, law) == pytest.approx(decay(0.2, Gamma(4.0)), rel=0.02)


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999, 1.001, 2.0, 5.0])
def test_the_root_is_one_and_none_is_to_its_right(law, share):
    load = share * smooth_load(law)
    root = dominant_root(load, law)
    if root == law.abscissa:  # no root at all where the transform is finite
        assert roots_right_of(load, law, root.real + 1e-2) == 0
        return
    assert abs(root + load * complex(law.laplace(root))) < 1e-9 / law.mean
    assert roots_right_of(load, law, root.real + 1e-4 / law.mean) == 0
    assert roots_right_of(load, law, root.real - 1e-4 / law.mean) >= (1 if root.imag == 0 else 2)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_the_derivative_is_that_of_the_transform(law):
    s, h = (0.1 + 0.7j) / law.mean, 1e-5 / law.mean
    value, slope = law.with_slope(s)
    assert value == pytest.approx(law.laplace(s))
    assert slope == pytest.approx((law.laplace(s + h) - law.laplace(s - h)) / (2 * h), rel=1e-6)
    assert -float(law.with_slope(0.0)[1].real) == pytest.approx(law.mean)


@given(times, st.floats(0.05, 8.0))
def test_no_set_of_measured_times_hides_a_root_further_right(values, load):
    law = Samples.of([time / np.mean(values) for time in values])
    assert roots_right_of(load, law, decay(load, law) * -1 + 1e-3) == 0


@given(times)
def test_below_half_pi_every_delay_law_is_stable(values):
    law = Samples.of([time / np.mean(values) for time in values])
    assert critical_load(law) >= SAFE_LOAD * (1 - 1e-9)
    assert decay(0.999 * SAFE_LOAD, law) > 0


@pytest.mark.parametrize("law", [law for law in LAWS if critical_load(law) < inf], ids=repr)
def test_the_bound_is_where_the_decay_ends(law):
    bound = critical_load(law)
    assert decay(0.999 * bound, law) > 0 > decay(1.001 * bound, law)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_scaling_time_scales_the_rate_inversely(law):
    assert decay(0.5 / 7.0, law.scaled(7.0)) == pytest.approx(decay(0.5, law) / 7.0, rel=1e-6)


@pytest.mark.parametrize(
    ("step_curvature", "staleness", "exact", "formula"),
    [
        (0.05, 3, 0.062137, 0.062150),
        (0.05, 7, 0.131885, 0.131629),
        (0.05, 15, 0.031928, 0.031927),
        (0.1, 9, 0.037223, 0.037248),
    ],
)
def test_half_a_step_less_delay_stands_for_updates_one_by_one(step_curvature, staleness, exact, formula):
    delay = staleness + 0.5
    assert decay_per_update(step_curvature, staleness) == pytest.approx(exact, abs=6e-7)
    assert decay(step_curvature * delay, Constant()) / delay == pytest.approx(formula, abs=6e-7)


def test_one_worker_decays_as_plain_descent():
    assert decay(0.05 / 2, Constant()) / 0.5 == pytest.approx(0.051299, abs=6e-7)
    assert decay_per_update(0.05, 0) == pytest.approx(0.051293, abs=6e-7)


@pytest.mark.parametrize(
    ("staleness", "bound"), [(0, 2.0), (1, 1.0), (2, 0.618), (3, 0.445), (7, 0.209), (15, 0.101)]
)
def test_round_robin_is_stable_up_to_the_discrete_bound(staleness, bound):
    """Levin and May 1976."""
    exact = 2 * sin(pi / (2 * (2 * staleness + 1)))
    assert exact == pytest.approx(bound, abs=5e-4)
    assert decay_per_update(0.999 * exact, staleness) > 0
    assert decay_per_update(1.001 * exact, staleness) < 0


def test_pooling_keeps_the_mean_and_the_weights():
    law = pool([Samples((1.0,)), Samples((2.0, 4.0))], [3.0, 1.0])
    assert law.mean == pytest.approx((3 * 1.0 + 1 * 3.0) / 4)
    assert float(law.laplace(0.3).real) == pytest.approx(
        0.75 * np.exp(-0.3) + 0.125 * (np.exp(-0.6) + np.exp(-1.2)), rel=1e-3
    )


@pytest.mark.parametrize(
    "make",
    [lambda: Gamma(0.0), lambda: ShiftedExponential(1.0), lambda: Samples(()), lambda: Samples((0.0,))],
)
def test_impossible_laws_are_refused(make):
    with pytest.raises(ConfigError, match="got"):
        make()


def test_far_beyond_the_bound_the_error_grows_as_at_that_distance():
    """The followed root ends left of the axis there, and no grid of starts finds the other."""
    law = Samples.of(np.exp(np.random.default_rng(0).normal(-0.5, 1.0, 1000)).tolist())
    bound = critical_load(law)
    assert decay(1e9 * bound, law) == decay(FAR * bound, law) < decay(2 * bound, law) < 0
    assert roots_right_of(FAR * bound, law, -decay(FAR * bound, law) + 1e-6) == 0
    assert decay(1e9, ShiftedExponential()) == pytest.approx(0.5)
