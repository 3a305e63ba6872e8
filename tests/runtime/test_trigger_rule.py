"""When a worker pushes, norm by norm; and what a sum of gradients is told to be."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.runtime.worker.optimizer.trigger import LAST, Trigger, Withheld, norm_of


def mean_of(trigger: Trigger, norms: list[float]) -> float:
    for norm in norms:
        trigger.saw(norm)
    return trigger.standing[1]


def test_the_mean_is_of_all_norms_at_first_and_forgets_old_ones_later() -> None:
    trigger = Trigger(1.0, 8)
    assert mean_of(trigger, [1.0, 2.0, 6.0]) == pytest.approx(3.0)
    assert mean_of(trigger, [3.0] * (LAST - 3)) == pytest.approx(3.0)
    assert mean_of(trigger, [103.0]) == pytest.approx(4.0)
    assert mean_of(trigger, [math.nan, math.inf]) == pytest.approx(4.0)
    assert mean_of(trigger, [50.0] * (20 * LAST)) == pytest.approx(50.0)


@pytest.mark.parametrize(("norm", "fires"), [(1.49, False), (1.5, True), (math.nan, True), (math.inf, True)])
def test_a_norm_of_the_share_or_more_fires_and_so_does_what_is_none(norm: float, fires: bool) -> None:
    trigger = Trigger(0.5, 8)
    trigger.saw(3.0)
    assert trigger.fires(norm) is fires


def test_a_worker_whose_gradients_are_zero_pushes_them() -> None:
    trigger = Trigger(2.0, 8)
    trigger.saw(0.0)
    assert trigger.fires(0.0)


def test_a_sum_has_a_gradient_for_what_one_of_its_parts_has_one_for() -> None:
    withheld = Withheld()
    for value, missing in ((1.0, (0, 1)), (2.0, (1, 2))):
        withheld.add([torch.full((3,), value)], missing)
        withheld.count(4, [], 0.5)
    assert withheld.missing == {1}
    assert torch.equal(withheld.memory[0], torch.full((3,), 3.0))
    assert (withheld.steps, withheld.samples, withheld.each, withheld.compute_s) == (2, 8, 4, 1.0)
    withheld.clear()
    withheld.add([torch.ones(3)], (2,))
    assert withheld.missing == {2}
    assert torch.equal(withheld.memory[0], torch.ones(3))
    assert withheld.each == 0, "nobody counts its samples"


def test_a_norm_is_of_all_types_together_and_16_bits_do_not_overflow() -> None:
    parts = [torch.full((4,), 6e4, dtype=torch.float16), torch.full((9,), 4e4, dtype=torch.float64)]
    wide = torch.cat([part.double() for part in parts])
    assert norm_of(parts) == pytest.approx(float(torch.linalg.vector_norm(wide)), rel=1e-3)
