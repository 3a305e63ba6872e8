"""The store's arithmetic: reducing, clipping, finding what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.store.layout import Layout, describe
from paceline.store.optimizers import describe_optimizer
from paceline.store.parameters import Gradients, ParameterStore, shares

SHAPES = ((5, 3), (7,), (2, 2))


class Bag(nn.Module):
    """A few parameters of one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in SHAPES])


def bag(
    dtype: torch.dtype = torch.float64, name: str = "SGD", **settings: float
) -> tuple[Layout, ParameterStore, list[dict[str, object]]]:
    model = Bag(dtype)
    owned = list(model.parameters())
    optimizer = getattr(torch.optim, name)(owned, **{"lr": 1.0, **settings})
    layout = describe(model, owned)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(owned)})
    weights = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    return layout, ParameterStore(layout, spec, weights), [group.settings for group in spec.groups]


def random_gradients(layout: Layout, seed: int) -> Gradients:
    gradients = Gradients(layout, torch.zeros(layout.segment_bytes, dtype=torch.uint8))
    generator = torch.Generator().manual_seed(seed)
    for view in gradients.views:
        view.copy_(torch.randn(view.shape, generator=generator))
    return gradients


def values(gradients: Gradients) -> Tensor:
    return torch.cat([view.flatten().double() for view in gradients.views])


@given(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=5))
def test_a_reduction_is_the_weighted_sum_and_tells_its_norm(weights: list[float]) -> None:
    layout, store, _ = bag()
    parts = [(random_gradients(layout, rank), share) for rank, share in enumerate(weights)]
    expected = sum(values(gradients) * share for gradients, share in parts)
    total, norm = store.reduce(parts)
    torch.testing.assert_close(values(total), expected, rtol=1e-12, atol=1e-12)
    assert norm == pytest.approx(float(torch.linalg.vector_norm(expected)), rel=1e-12)


def test_a_reduction_does_not_depend_on_when_who_came() -> None:
    layout, store, _ = bag(torch.float32)
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        made = {rank: random_gradients(layout, rank) for rank in order}
        total, _ = store.reduce([(made[rank], 1 / 3) for rank in sorted(made)])
        results.append(values(total))
    assert torch.equal(*results)


def test_sixteen_bit_gradients_add_up_in_thirty_two() -> None:
    """In sixteen bits 256 + 1 is 256, and the small ones would vanish one by one."""
    layout, store, _ = bag(torch.bfloat16)
    parts = [(random_gradients(layout, rank), 1.0) for rank in range(9)]
    for rank, (gradients, _) in enumerate(parts):
        for view in gradients.views:
            view.fill_(1.0 if rank else 256.0)
    total, _ = store.reduce(parts)
    assert set(values(total).tolist()) == {264.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_number_that_is_not_finite_shows_in_the_norm_and_is_found(dtype: torch.dtype, bad: float) -> None:
    layout, store, _ = bag(dtype)
    gradients = random_gradients(layout, 0)
    assert math.isfinite(store.norm(gradients))
    assert gradients.bad_parameter(layout) is None
    gradients.views[1][3] = bad
    assert not math.isfinite(store.norm(gradients))
    assert gradients.bad_parameter(layout) == "parts.1"
    assert not math.isfinite(store.reduce([(random_gradients(layout, 1), 0.5), (gradients, 0.5)])[1])


def test_a_norm_whose_square_overflows_is_still_finite() -> None:
    layout, store, _ = bag(torch.float32)
    gradients = random_gradients(layout, 0)
    for view in gradients.views:
        view.fill_(1e30)
    assert store.norm(gradients) == pytest.approx(1e30 * math.sqrt(26), rel=1e-5)


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_clipping_is_that_of_torch(clip: float) -> None:
    layout, store, settings = bag()
    gradients = random_gradients(layout, 0)
    reference = [nn.Parameter(torch.zeros_like(view)) for view in gradients.views]
    for parameter, view in zip(reference, gradients.views, strict=True):
        parameter.grad = view.clone()
    nn.utils.clip_grad_norm_(reference, clip)
    store.apply(gradients, settings, 1.0, store.norm(gradients), clip)
    for parameter, view in zip(reference, store.views, strict=True):
        torch.testing.assert_close(view, -parameter.grad, rtol=1e-9, atol=1e-12)


def test_the_step_is_scaled_and_not_the_gradient() -> None:
    """Adam's first step is the learning rate, however large the gradient."""
    layout, store, settings = bag(name="Adam")
    store.apply(random_gradients(layout, 0), settings, 0.25)
    moved = torch.cat([view.flatten().abs() for view in store.views])
    torch.testing.assert_close(moved, torch.full_like(moved, 0.25), rtol=1e-6, atol=1e-6)


def test_a_parameter_missing_from_all_stays_and_one_missing_from_some_moves() -> None:
    layout, store, settings = bag(name="AdamW", weight_decay=0.5)
    for view in store.views:
        view.fill_(1.0)
    one, other = random_gradients(layout, 1), random_gradients(layout, 2)
    one.missing, other.missing = frozenset({0, 1}), frozenset({1, 2})
    for index in (0, 1):
        one.views[index].zero_()
    total, norm = store.reduce([(one, 0.5), (other, 0.5)])
    assert total.missing == frozenset({1})
    store.apply(total, settings, 1.0, norm)
    assert bool((store.views[1] == 1).all())
    assert not bool((store.views[0] == 1).any())
    assert not bool((store.views[2] == 1).any())


def test_a_copy_has_all_trained_weights() -> None:
    layout, store, settings = bag()
    store.apply(random_gradients(layout, 0), settings, 1.0)
    copy = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    store.copy_weights(copy)
    assert torch.equal(copy, store.weights)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 64)), min_size=1, max_size=10))
def test_shares_of_a_mean_add_up_to_one_and_follow_the_samples(pushes: list[tuple[float, int]]) -> None:
    weights, samples = [weight for weight, _ in pushes], [count for _, count in pushes]
    parts = shares(weights, samples, mean=True)
    assert sum(parts) == pytest.approx(1.0)
    if sum(samples):
        for one, (weight, count) in zip(parts, pushes, strict=True):
            for other, (weight_2, count_2) in zip(parts, pushes, strict=True):
                assert one * weight_2 * count_2 == pytest.approx(other * weight * count)


def test_shares_of_a_sum_are_the_weights() -> None:
    assert shares([0.5, 2.0], [1, 9], mean=False) == [0.5, 2.0]


def test_a_sum_may_have_memory_of_its_own_and_then_leaves_all_gradients_as_they_are() -> None:
    layout, store, _ = bag()
    made = [random_gradients(layout, seed) for seed in range(3)]
    before = [[flat.clone() for flat in each.flats] for each in made]
    target = random_gradients(layout, 9)
    total, norm = store.reduce([(each, 1 / 3) for each in made], target)
    assert total is target
    for each, flats in zip(made, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(each.flats, flats, strict=True))
    again, same = store.reduce([(each, 1 / 3) for each in made])
    assert norm == same
    assert all(torch.equal(a, b) for a, b in zip(total.flats, again.flats, strict=True))


def test_the_step_is_scaled_also_where_a_parameter_has_no_gradient() -> None:
    layout, store, settings = bag(name="Adam")
    gradients = random_gradients(layout, 0)
    gradients.missing = frozenset([1])
    store.apply(gradients, settings, 0.25)
    for index, view in enumerate(store.views):
        expected = torch.full_like(view, 0.0 if index == 1 else 0.25)
        torch.testing.assert_close(view.abs(), expected, rtol=1e-6, atol=1e-6)


def test_whole_gradients_are_all_in_their_sum() -> None:
    layout, store, _ = bag()
    parts = [random_gradients(layout, seed) for seed in range(3)]
    expected = sum(values(part) for part in parts)
    total, _ = store.reduce([(part, 1.0) for part in parts])
    torch.testing.assert_close(values(total), expected)
