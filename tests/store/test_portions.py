"""A store in portions moves its weights as a whole one does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import ConfigError
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerSpec, describe_optimizer, export_state, import_state
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.spread.portions import (
    FirstPortion,
    Portion,
    PortionStore,
    Pushed,
    StepOrder,
    cut,
    of_whole,
    own_missing,
    portion_layout,
    to_whole,
)

SETTINGS = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "AdamW": {}, "RMSprop": {"momentum": 0.5}}


class Net(nn.Module):
    """Odd sizes, so that there is padding; two types; and something that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 53)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.convolution = nn.Conv2d(3, 11, 3).to(memory_format=torch.channels_last)
        self.second = nn.Linear(53, 13).double()
        self.last = nn.Linear(13, 7)


def build(name: str) -> tuple[Layout, OptimizerSpec, Tensor]:
    """A model with its biases in a parameter group of their own."""
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [[p for p in trained if (p.dim() > 1) is wide] for wide in (True, False)]
    optimizer = getattr(torch.optim, name)(
        [{"params": groups[0]}, {"params": groups[1], "lr": 0.003}], lr=0.01, **SETTINGS[name]
    )
    layout = describe(model, [*groups[0], *groups[1]])
    named = dict(model.named_parameters())
    index = {id(named[slot.name]): place for place, slot in enumerate(layout.trained)}
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    for slot, view in zip(layout.parameters, layout.weight_views(memory), strict=True):
        view.copy_(named[slot.name].detach())
    return layout, describe_optimizer(optimizer, index), memory


def pushes(layout: Layout, seed: int) -> list[Tensor]:
    """Segments of three workers."""
    generator = torch.Generator().manual_seed(seed)
    segments = [torch.zeros(layout.segment_bytes, dtype=torch.uint8) for _ in range(3)]
    for segment in segments:
        for view in layout.gradient_views(segment):
            view.copy_(torch.randn(view.shape, generator=generator))
    return segments


def step(store: ParameterStore, spec: OptimizerSpec, segments: list[Tensor]) -> None:
    """Their mean, in this store."""
    gradients = [Gradients(store.layout, segment.clone()) for segment in segments]
    total, _ = store.reduce([(each, 1 / 3) for each in gradients])
    store.apply(total, [group.settings for group in spec.groups], 0.5)


def portioned(
    layout: Layout, spec: OptimizerSpec, memory: Tensor, count: int
) -> list[tuple[Portion, ParameterStore]]:
    """A store for each portion, all over one memory."""
    return [(portion, PortionStore(layout, spec, portion, memory)) for portion in cut(layout, count)]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_portions_move_the_weights_as_the_whole_does_bit_for_bit(name: str, count: int) -> None:
    layout, spec, memory = build(name)
    whole, stores = ParameterStore(layout, spec, memory.clone()), portioned(layout, spec, memory, count)
    for seed in range(4):
        step(whole, spec, pushes(layout, seed))
        for _, store in stores:
            step(store, spec, pushes(layout, seed))
    assert torch.equal(whole.weights, memory)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_the_state_of_portions_is_the_state_of_the_whole(name: str) -> None:
    layout, spec, memory = build(name)
    whole, stores = ParameterStore(layout, spec, memory.clone()), portioned(layout, spec, memory, 3)
    step(whole, spec, pushes(layout, 0))
    for _, store in stores:
        step(store, spec, pushes(layout, 0))
    tensors, _ = export_state(whole.optimizer)
    gathered: dict[str, Tensor] = {}
    for portion, store in stores:
        gathered |= to_whole(spec, portion, export_state(store.optimizer)[0])
    assert gathered.keys() == tensors.keys()
    assert all(torch.equal(gathered[key], tensors[key]) for key in tensors)
    for portion, store in portioned(layout, spec, memory, 2):  # and goes on in other portions
        import_state(store.optimizer, of_whole(spec, portion, tensors), {})
        step(store, spec, pushes(layout, 1))
    step(whole, spec, pushes(layout, 1))
    assert torch.equal(whole.weights, memory)


@pytest.mark.parametrize("count", range(1, 9))
def test_portions_cover_every_trained_parameter_once_and_nothing_else(count: int) -> None:
    layout, _, _ = build("SGD")
    portions = cut(layout, count)
    assert [i for each in portions for i in range(each.first, each.last)] == list(range(8))
    assert all(one.weights[1] == two.weights[0] for one, two in pairwise(portions))
    assert all(one.gradients[1] == two.gradients[0] for one, two in pairwise(portions))
    names = [slot.name for each in portions for slot in portion_layout(layout, each).parameters]
    assert sorted(names) == sorted(slot.name for slot in layout.parameters)


def large() -> tuple[Layout, OptimizerSpec, Tensor]:
    """Large enough for pieces of unequal sizes, in numbers that no vector register divides."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1031, 1033) for _ in range(3)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    layout = describe(model, parameters)
    spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(parameters)})
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    for view, parameter in zip(layout.weight_views(memory), parameters, strict=True):
        view.copy_(parameter.detach())
    return layout, spec, memory


def test_where_large_memory_is_cut_changes_no_bit() -> None:
    layout, spec, memory = large()
    whole, stores = ParameterStore(layout, spec, memory.clone()), portioned(layout, spec, memory, 3)
    for seed in range(2):
        for store in (whole, *(store for _, store in stores)):
            step(store, spec, pushes(layout, seed))
    assert torch.equal(whole.weights, memory)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("model", [partial(build, "SGD"), large], ids=["small", "large"])
def test_the_squares_that_make_a_norm_are_the_same_wherever_the_store_is_cut(
    model: Callable[[], tuple[Layout, OptimizerSpec, Tensor]], count: int
) -> None:
    layout, spec, memory = model()
    whole = ParameterStore(layout, spec, memory.clone())
    stores = [store for _, store in portioned(layout, spec, memory, count)]
    for store in (whole, *stores):
        store.norm_by_parameter()
    segments = pushes(layout, 0)
    alone, together = squares(whole, segments)
    parts = [squares(store, segments) for store in stores]
    assert alone == [square for part, _ in parts for square in part]
    assert together == [square for _, part in parts for square in part]


def squares(store: ParameterStore, segments: list[Tensor]) -> tuple[list[float], list[float]]:
    """Of one push alone, and of the mean of all."""
    gradients = [Gradients(store.layout, segment.clone()) for segment in segments]
    alone = store.squares(gradients[0])
    return alone, store.add_up([(each, 1 / 3) for each in gradients])[1]


def test_two_portions_of_equal_layers_are_equal() -> None:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(6)]
    model = nn.Sequential(*layers)
    first, second = cut(describe(model, list(model.parameters())), 2)
    assert (first.last - first.first) == (second.last - second.first) == 3


def test_more_portions_than_parameters_are_refused() -> None:
    layout, _, _ = build("SGD")
    with pytest.raises(ConfigError, match=r"on 9 hosts, but .* enough for 8 only.*--store-hosts 8"):
        cut(layout, 9)


def test_what_is_done_to_the_first_portion_can_be_done_to_the_others() -> None:
    """The record names gradients by who pushed them, with their shares and the settings as they were used."""
    layout, spec, memory = build("SGD")
    whole = ParameterStore(layout, spec, memory.clone())
    portions, segments = cut(layout, 2), pushes(layout, 0)
    store = FirstPortion(layout, spec, portions[0], memory)
    gradients = [Gradients(store.layout, segment.clone()) for segment in segments]
    store.pushed = {each: Pushed(0, lane, 1) for lane, each in enumerate(gradients)}
    store.adjusted = whole.adjusted = {"momentum": 0.5}
    settings = [group.settings for group in spec.groups]
    store.apply(store.reduce([(each, 1 / 3) for each in gradients])[0], settings, 0.5)
    (done,) = store.done
    assert isinstance(done, StepOrder)
    assert [pushed.lane for pushed, _ in done.parts] == [0, 1, 2]
    other = PortionStore(layout, spec, portions[1], memory)
    theirs = [(Gradients(other.layout, segments[p.lane].clone()), share) for p, share in done.parts]
    other.apply(other.reduce(theirs)[0], done.settings, done.scale)
    step(whole, spec, segments)
    assert torch.equal(whole.weights, memory)


def test_a_norm_counts_what_lies_elsewhere() -> None:
    layout, spec, memory = build("SGD")
    store = FirstPortion(layout, spec, cut(layout, 2)[0], memory)
    gradients = Gradients(store.layout, torch.zeros(layout.segment_bytes, dtype=torch.uint8))
    store.elsewhere[gradients] = [4.0, 5.0]
    assert store.norm(gradients) == 3.0
    store.elsewhere[gradients] = [float("inf")]
    assert store.norm(gradients) == float("inf")


def test_missing_gradients_are_those_of_the_portion() -> None:
    assert own_missing((0, 3, 5), Portion(3, 5, (0, 0), (0, 0))) == (0,)
