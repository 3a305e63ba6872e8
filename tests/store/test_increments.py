"""A store that adds what workers' own steps have changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.store.increments import AddingStore
from paceline.store.layout import Layout, describe
from paceline.store.parameters import Gradients

SIZE = 5000


def laid_out(dtype: torch.dtype) -> tuple[Layout, AddingStore]:
    model = nn.Linear(SIZE, 1, bias=False, dtype=dtype)
    layout = describe(model, list(model.parameters()))
    return layout, AddingStore(layout, torch.zeros(layout.weights_bytes, dtype=torch.uint8), "SGD")


def wild(dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of very different sizes and both signs."""
    generator = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-6, 4, (1, SIZE), generator=generator)
    return (torch.randn(1, SIZE, generator=generator) * size).to(dtype)


def pushed(layout: Layout, values: Tensor) -> Gradients:
    gradients = Gradients(layout, torch.zeros(layout.segment_bytes, dtype=torch.uint8))
    gradients.views[0].copy_(values)
    return gradients


def memory_with(layout: Layout, values: Tensor) -> Tensor:
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    layout.weight_views(memory)[0].copy_(values)
    return memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_that_nobody_else_has_moved_become_the_worker_s_bit_for_bit(dtype: torch.dtype) -> None:
    """Also where old + (new - old) is not new."""
    layout, store = laid_out(dtype)
    old, new = wild(dtype, 1), wild(dtype, 2)
    assert not torch.equal(old + (new - old), new), "the numbers are wild enough"
    store.views[0].copy_(old)
    store.add(pushed(layout, new), memory_with(layout, old))
    assert torch.equal(store.views[0], new)


def test_weights_that_others_have_moved_get_the_difference() -> None:
    layout, store = laid_out(torch.float64)
    old, new, now = (torch.full((1, SIZE), value, dtype=torch.float64) for value in (3.0, 5.0, 10.0))
    store.views[0].copy_(now)
    store.add(pushed(layout, new), memory_with(layout, old))
    assert torch.equal(store.views[0], torch.full_like(now, 12.0))


def test_what_a_worker_has_read_may_be_where_the_sum_is_wanted() -> None:
    """It is released at once, into the memory that it has read from."""
    layout, store = laid_out(torch.float64)
    old, new = torch.ones(1, SIZE, dtype=torch.float64), torch.full((1, SIZE), 4.0, dtype=torch.float64)
    store.views[0].fill_(7.0)
    read, other = memory_with(layout, old), memory_with(layout, old)
    store.add(pushed(layout, new), read, [read, other])
    assert torch.equal(layout.weight_views(read)[0], torch.full_like(old, 10.0))
    assert torch.equal(layout.weight_views(other)[0], torch.full_like(old, 10.0))


def test_what_workers_told_comes_back_to_each() -> None:
    _, store = laid_out(torch.float64)
    store.told = {1: ({"0.momentum_buffer": torch.ones(3)}, {"0.step": 7}), 12: ({}, {})}
    tensors, values = store.export()
    store.load(tensors, values)
    assert store.found.keys() == {1, 12}
    assert torch.equal(store.found[1][0]["0.momentum_buffer"], torch.ones(3))
    assert store.found[1][1] == {"0.step": 7}
    assert store.found[12] == ({}, {})


def test_what_a_worker_tells_ahead_of_a_push_counts_with_that_push() -> None:
    """A checkpoint in between must not have a momentum of which the weights know nothing."""
    _, store = laid_out(torch.float64)
    store.tell(1, ({}, {"0.step": 1}), ahead=True)
    assert store.told == {}
    store.pushed(1)
    assert store.told == {1: ({}, {"0.step": 1})}
    store.pushed(1)
    assert store.told == {}, "it has stepped since, and not told"
