"""What a lone worker looks at before it steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.runtime.lone.gradients import clip, gradients_of, sums_are_finite
from paceline.runtime.lone.recorded import pass_over


def test_every_gradient_that_will_be_stepped_with_is_looked_at_and_no_other() -> None:
    rows, used, idle, frozen = (
        nn.Embedding(5, 2, sparse=True),
        *(nn.Parameter(torch.ones(2)) for _ in range(3)),
    )
    (rows(torch.tensor([1, 1])).sum() + used.sum() + frozen.sum()).backward()
    frozen.requires_grad_(False)
    groups = [{"params": [*rows.parameters(), idle]}, {"params": [frozen, used]}]
    found = gradients_of(torch.optim.SGD(groups, lr=0.1))
    assert [gradient.tolist() for gradient in found] == [[[2.0, 2.0]], [1.0, 1.0]]


def test_one_number_that_is_not_finite_shows_in_whichever_gradient_it_is() -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        for bad in range(3):
            gradients = [torch.ones(4) for _ in range(3)]
            assert sums_are_finite(gradients)
            gradients[bad][2] = value
            assert not sums_are_finite(gradients)


@pytest.mark.parametrize(("most", "norm"), [(2.5, 2.5), (10.0, 5.0)])
def test_clipped_gradients_have_the_norm_together_and_short_ones_stay(most: float, norm: float) -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    clip(gradients, most)
    torch.testing.assert_close(gradients[0], torch.tensor([3.0, 0.0]) * norm / 5)
    torch.testing.assert_close(gradients[1], torch.tensor([4.0]) * norm / 5)


def test_what_a_resumed_run_passes_over_is_told_of_if_it_takes_long() -> None:
    said: list[str] = []
    batches = iter(range(5))
    assert pass_over(batches, 3, said.append, quiet_s=-1.0) == 3
    assert said[-1] == "loading once more what was done before the run was stopped: batch 2 of 3"
    assert next(batches) == 3
    assert pass_over(batches, 9, said.append) == 1
