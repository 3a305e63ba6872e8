"""The error floor: published values, the exact Lyapunov equation, closed forms."""

from __future__ import annotations

from math import e, inf

import numpy as np
import pytest

from paceline.plan.staleness.delays import Constant, Gamma, Samples, ShiftedExponential, Smeared
from paceline.plan.staleness.floor import exact_alone, floor_factor, poisson_factor
from paceline.plan.staleness.roots import critical_load


def exact_variance(step_curvature, momentum, staleness):
    """E[x^2] of round robin with unit noise per update, from the discrete Lyapunov equation."""
    n = staleness + 2
    system, noise = np.zeros((n, n)), np.zeros(n)
    system[0, 0], system[0, n - 1], system[n - 1, n - 1] = 1.0, momentum, momentum
    system[0, staleness] -= step_curvature
    system[n - 1, staleness] -= step_curvature
    for i in range(1, staleness + 1):
        system[i, i - 1] = 1.0
    noise[0] = noise[n - 1] = 1.0
    total = np.outer(noise, noise)
    for _ in range(40):
        total, system = total + system @ total @ system.T, system @ system
    return total[0, 0]


@pytest.mark.parametrize(
    ("load", "phi"),
    [
        (0.05, 1.051293),
        (0.1, 1.105356),
        (0.2, 1.223049),
        (0.3, 1.356088),
        (1 / e, 1.457131),
        (0.5, 1.685796),
        (1.0, 3.408223),
        (1.5, 28.238),
    ],
)
def test_constant_delay_and_its_integral(load, phi):
    assert floor_factor(load, Constant()) == pytest.approx(phi, rel=1e-5)
    assert floor_factor(load, Samples((1.0,))) == pytest.approx(phi, rel=1e-5)


@pytest.mark.parametrize("load", [0.1, 1.0, 5.0])
def test_exponential_delay_and_its_integral(load):
    assert floor_factor(load, ShiftedExponential()) == pytest.approx(1 + load)
    assert floor_factor(load, Gamma(1.0)) == pytest.approx(1 + load, rel=1e-4)


def test_from_the_bound_on_there_is_no_floor():
    assert floor_factor(1.5708, Constant()) == inf
    assert floor_factor(1.01 * critical_load(Gamma(4.0)), Gamma(4.0)) == inf
    assert floor_factor(0.0, Gamma(4.0)) == 1.0


@pytest.mark.parametrize(
    ("step_curvature", "workers", "law", "formula"),
    [
        (0.1, 1, Constant(), 5.256e-4),
        (0.02, 10, Constant(), 3.0266e-3),
        (0.1, 10, Constant(), 1.5588e-3),
        (0.15, 10, Constant(), 4.564e-3),
        (0.1, 10, Gamma(4.0), 1.266e-3),
        (0.1, 10, ShiftedExponential(), 9.75e-4),
    ],
)
def test_published_variances(step_curvature, workers, law, formula):
    variance = 1e-4 / (2 * step_curvature) * floor_factor(step_curvature * (workers - 0.5), law)
    assert variance == pytest.approx(formula, rel=3e-4)


@pytest.mark.parametrize(
    ("step_curvature", "workers", "exact", "within"),
    [
        (0.1, 1, 5.263e-4, 2e-3),
        (0.02, 10, 3.0268e-3, 2e-4),
        (0.1, 10, 1.5618e-3, 3e-3),
        (0.15, 10, 4.62e-3, 2e-2),
    ],
)
def test_the_formula_is_near_the_exact_recursion(step_curvature, workers, exact, within):
    variance = 1e-4 * exact_variance(step_curvature, 0.0, workers - 1)
    assert variance == pytest.approx(exact, rel=3e-4)
    formula = 1e-4 / (2 * step_curvature) * floor_factor(step_curvature * (workers - 0.5), Constant())
    assert formula == pytest.approx(variance, rel=within)


@pytest.mark.parametrize("step_curvature", [0.01, 0.1, 0.4])
def test_one_worker_has_the_floor_of_plain_descent(step_curvature):
    exact = 2 / (2 - step_curvature)
    assert exact_alone(step_curvature) == pytest.approx(exact)
    assert abs(floor_factor(step_curvature / 2, Constant()) - exact) < step_curvature**2


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("workers", [2, 4, 10, 20])
@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_momentum_filters_the_noise_too(momentum, workers, share):
    law = Smeared(Constant(), momentum, 1 / (workers - 0.5))
    load = share * critical_load(law)
    step = load * (1 - momentum) / (workers - 0.5)
    exact = exact_variance(step, momentum, workers - 1) * 2 * step * (1 - momentum)
    assert floor_factor(load, law) == pytest.approx(exact, rel=0.025)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_one_worker_with_momentum_is_exact(momentum):
    exact = exact_variance(0.3, momentum, 0) * 2 * 0.3 * (1 - momentum)
    assert exact_alone(0.3, momentum) == pytest.approx(exact, rel=1e-9)
    assert exact_alone(2 * (1 + momentum), momentum) == inf


def test_truly_random_arrivals_raise_the_floor_and_may_take_it_away():
    assert poisson_factor(1.0, 0.0) == 1.0
    assert poisson_factor(2.0, 0.1) == pytest.approx(2.0 / 0.9)
    assert poisson_factor(2.0, 1.0) == inf
