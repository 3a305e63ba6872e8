"""Slices of parameters: portions of equal bytes, the same bits, and the state of whole parameters."""

from __future__ import annotations

from itertools import chain
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.store.corrections.correction import GradientPart, Stride
from paceline.store.layout import ALIGN, Layout, describe
from paceline.store.optimizers import OptimizerSpec, describe_optimizer
from paceline.store.parameters import CHUNK, Gradients, ParameterStore
from paceline.store.spread.portions import PortionStore, cut, of_whole, own_missing, to_whole
from paceline.store.spread.slices import Slices, slice_evenly, slices_of

SETTINGS = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "AdamW": {}, "Rprop": {}}


def build(name: str, width: int = 61) -> tuple[Layout, OptimizerSpec, Tensor]:
    """One wide layer among small ones, two types, two parameter groups, and a layer of unusual strides."""
    torch.manual_seed(0)
    model = nn.ModuleList(
        [
            nn.Linear(3, 5),
            nn.Conv2d(16, width, 3).to(memory_format=torch.channels_last),
            nn.Linear(7, 11).double(),
            nn.Linear(5, 2),
        ]
    )
    model[0].bias.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    wide, narrow = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() == 1]
    groups = [{"params": wide}, {"params": narrow, "lr": 0.003}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01, **SETTINGS[name])
    layout = describe(model, [*wide, *narrow])
    named = dict(model.named_parameters())
    index = {id(named[slot.name]): place for place, slot in enumerate(layout.trained)}
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    for slot, view in zip(layout.parameters, layout.weight_views(memory), strict=True):
        view.copy_(named[slot.name].detach())
    return layout, describe_optimizer(optimizer, index), memory


def gradients(layout: Layout, seed: int, missing: tuple[int, ...] = ()) -> Tensor:
    """A segment."""
    generator = torch.Generator().manual_seed(seed)
    segment = torch.zeros(layout.segment_bytes, dtype=torch.uint8)
    for index, view in enumerate(layout.gradient_views(segment)):
        if index not in missing:
            view.copy_(torch.randn(view.shape, generator=generator))
    return segment


def step(store: ParameterStore, spec: OptimizerSpec, segment: Tensor, missing: tuple[int, ...] = ()) -> None:
    """One, with these gradients."""
    own = Gradients(store.layout, segment.clone())
    own.missing = frozenset(missing)
    store.apply(own, [group.settings for group in spec.groups], 1.0)


def state_of(slices: Slices, stores: list[tuple[object, ParameterStore]]) -> tuple[dict, dict]:
    """Of the whole model, from all portions."""
    tensors, values = {}, {}
    for portion, store in stores:
        own = store.export()
        tensors |= to_whole(slices.optimizer, portion, own[0])
        values |= to_whole(slices.optimizer, portion, own[1])
    return slices.to_whole(tensors, values)


@pytest.mark.parametrize("missing", [(), (1,), (0,)], ids=str)
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_slices_move_the_weights_as_the_whole_does_bit_for_bit_and_hand_back_its_state(
    name: str, count: int, missing: tuple[int, ...]
) -> None:
    layout, spec, memory = build(name)
    slices = slice_evenly(layout, spec, count)
    assert len(slices.layout.trained) > len(layout.trained)
    whole = ParameterStore(layout, spec, memory.clone())
    step(whole, spec, gradients(layout, 0))  # so that there is a state to be cut
    memory.copy_(whole.weights)
    state, stores = slices.of_whole(*whole.export()), []
    for portion in cut(slices.layout, count):
        store = PortionStore(slices.layout, slices.optimizer, portion, memory)
        store.load(*(of_whole(slices.optimizer, portion, part) for part in state))
        stores.append((portion, store))
    for seed in range(1, 4):
        segment = gradients(layout, seed, missing)
        step(whole, spec, segment, missing)
        for portion, store in stores:
            if missing:  # as an order says to all, if one lacks a gradient
                store.step_singly()
            step(store, slices.optimizer, segment, own_missing(slices_of(missing, slices.origins), portion))
    assert torch.equal(whole.weights, memory)
    tensors, values = state_of(slices, stores)
    expected, others = whole.export()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert all(tensors[key].shape == expected[key].shape for key in expected)
    assert values == others


def corrected_step(store: ParameterStore, spec: OptimizerSpec, segments: list[Tensor]) -> None:
    """Every worker's gradient through its own momentum; then the weights that the first one reads."""
    parts = [
        GradientPart(worker, Gradients(store.layout, segment.clone()), 0.5)
        for worker, segment in enumerate(segments)
    ]
    store.awake(frozenset({0, 1}))
    store.apply_each(parts, [group.settings for group in spec.groups], Stride(1.0, 0.5, 2))


@pytest.mark.parametrize("correct", ["dana", "dana+gap"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_workers_momenta_are_cut_and_joined_with_the_weights_bit_for_bit(name: str, correct: str) -> None:
    layout, spec, memory = build(name)
    slices = slice_evenly(layout, spec, 3)
    whole = ParameterStore(layout, spec, memory.clone())
    whole.correct(correct)
    corrected_step(whole, spec, [gradients(layout, seed) for seed in (0, 1)])
    memory.copy_(whole.weights)
    state, stores = slices.of_whole(*whole.export()), []
    for portion in cut(slices.layout, 3):
        store = PortionStore(slices.layout, slices.optimizer, portion, memory)
        store.correct(correct)
        store.load(*(of_whole(slices.optimizer, portion, part) for part in state))
        stores.append((portion, store))
    for seed in (2, 4):
        pushed = [gradients(layout, seed), gradients(layout, seed + 1)]
        corrected_step(whole, spec, pushed)
        for _, store in stores:
            corrected_step(store, slices.optimizer, pushed)
    ahead, theirs = whole.weights.clone(), whole.weights.clone()
    whole.hand_out(ahead)
    for _, store in stores:
        store.hand_out(theirs)
    assert torch.equal(whole.weights, memory)
    assert torch.equal(ahead, theirs)
    assert not torch.equal(ahead, whole.weights)
    tensors, values = state_of(slices, stores)
    expected, others = whole.export()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert values == others


@given(
    widths=st.lists(st.integers(1, 3000), min_size=1, max_size=6),
    count=st.integers(1, 6),
    double=st.booleans(),
)
def test_portions_are_of_equal_bytes_and_cover_every_element_once(
    widths: list[int], count: int, double: bool
) -> None:
    parameters = [nn.Parameter(torch.zeros(width)) for width in widths]
    if double:
        parameters[-1] = nn.Parameter(parameters[-1].double())
    layout = describe(nn.ParameterList(parameters), parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(parameters)})
    slices = slice_evenly(layout, spec, count)
    assert [slot.offset % ALIGN for slot in slices.layout.trained] == [0] * len(slices.layout.trained)
    by_name: dict[str, int] = {}
    for slot in slices.layout.trained:
        by_name[slot.name] = by_name.get(slot.name, 0) + prod(slot.shape)
    assert by_name == {slot.name: prod(slot.shape) for slot in layout.trained}
    assert slices.layout.regions == layout.regions
    if len(slices.layout.trained) >= count:
        sizes = [stop - start for start, stop in (each.weights for each in cut(slices.layout, count))]
        share = sum(sizes) / count
        assert max(sizes) <= 1.1 * share + 2 * ALIGN * count


def test_where_a_norm_decides_slices_end_where_chunks_do() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(1500, 1400), nn.Linear(3, 3))
    parameters = list(model.parameters())
    layout = describe(model, parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(parameters)})
    slices, memory = (
        slice_evenly(layout, spec, 3, by_chunks=True),
        torch.zeros(layout.weights_bytes, dtype=torch.uint8),
    )
    new = {slot.gradient for slot in slices.layout.trained} - {slot.gradient for slot in layout.trained}
    assert len(new) == 2
    assert all(place is not None and place // 4 % CHUNK == 0 for place in new)
    whole = ParameterStore(layout, spec, memory.clone())
    stores = [PortionStore(slices.layout, slices.optimizer, p, memory) for p in cut(slices.layout, 3)]
    segment = gradients(layout, 0)
    for store in (whole, *stores):
        store.norm_by_parameter()
    squares = [store.squares(Gradients(store.layout, segment.clone())) for store in stores]
    assert whole.squares(Gradients(layout, segment.clone())) == list(chain.from_iterable(squares))


def test_a_small_model_whose_norm_decides_is_cut_between_parameters() -> None:
    layout, spec, _ = build("SGD")
    assert slice_evenly(layout, spec, 3, by_chunks=True).origins == ()


def test_an_optimizer_that_needs_whole_parameters_gets_them() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    parameters = list(model.parameters())
    layout = describe(model, parameters)
    optimizer = torch.optim.Adafactor(parameters, lr=0.1)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(parameters)})
    assert slice_evenly(layout, spec, 2).layout == layout
