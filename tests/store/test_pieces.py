"""Updating flat pieces gives what updating parameter by parameter gives, and its state can be taken apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.store import pieces as pieces_module
from paceline.store.layout import describe
from paceline.store.optimizers import describe_optimizer, export_state, import_state
from paceline.store.parameters import Gradients, ParameterStore
from paceline.store.pieces import ELEMENTWISE

SETTINGS = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "RMSprop": {"momentum": 0.5}}


class Net(nn.Module):
    """Odd sizes, so that there is padding, and a channels_last convolution, so that strides matter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.second = nn.Linear(5, 3)


def build(name: str, *, fast: bool = True) -> tuple[ParameterStore, Gradients, list[dict[str, object]]]:
    """A store whose biases are a parameter group of their own, and one worker's gradients for it."""
    torch.manual_seed(0)
    model = Net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights}, {"params": biases, "lr": 0.003}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01, **SETTINGS.get(name, {}))
    trained = [*weights, *biases]
    layout = describe(model, trained)
    named = {p: i for i, p in enumerate(_in_order(model, layout))}
    spec = describe_optimizer(optimizer, {id(p): i for p, i in named.items()})
    memory = torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    for view, parameter in zip(layout.weight_views(memory), named, strict=True):
        view.copy_(parameter.detach())
    store = ParameterStore(layout, spec, memory, fast=fast)
    segment = torch.zeros(layout.segment_bytes, dtype=torch.uint8)
    return store, Gradients(layout, segment), [group.settings for group in spec.groups]


def _in_order(model: nn.Module, layout: object) -> list[Tensor]:
    named = dict(model.named_parameters())
    return [named[slot.name] for slot in layout.trained]  # type: ignore[attr-defined]


def train(
    store: ParameterStore, gradients: Gradients, settings: list[dict[str, object]], seeds: range
) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for view in gradients.views:
            view.copy_(torch.randn(view.shape, generator=generator))
        store.apply(gradients, settings, 1.0)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_pieces_move_the_weights_as_single_parameters_do(name: str) -> None:
    pieces, plain = build(name), build(name, fast=False)
    train(*pieces, range(5))
    train(*plain, range(5))
    for ours, theirs in zip(pieces[0].views, plain[0].views, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_state_taken_apart_and_put_together_again_goes_on_as_if_nothing_happened(name: str) -> None:
    whole, parted = build(name), build(name)
    train(*whole, range(6))
    train(*parted, range(3))
    tensors, values = export_state(parted[0].optimizer)
    resumed = build(name)
    resumed[0].weights.copy_(parted[0].weights)
    import_state(resumed[0].optimizer, tensors, values)
    train(*resumed, range(3, 6))
    assert torch.equal(whole[0].weights, resumed[0].weights)


def test_a_push_without_some_gradient_leaves_that_parameter_and_its_state_alone() -> None:
    store, gradients, settings = build("AdamW")
    train(store, gradients, settings, range(2))
    before = [view.clone() for view in store.views]
    gradients.missing = frozenset({1})
    train(store, gradients, settings, range(2, 3))
    unchanged = [torch.equal(old, new) for old, new in zip(before, store.views, strict=True)]
    assert unchanged == [index == 1 for index in range(len(unchanged))]
    steps = [state["step"].item() for state in store.optimizer.state_dict()["state"].values()]
    assert sorted(steps) == [2.0, *[3.0] * (len(steps) - 1)]


def test_parameters_that_missed_steps_keep_their_own_count_when_all_have_gradients_again() -> None:
    mixed, plain = build("Adam"), build("Adam", fast=False)
    for store, gradients, settings in (mixed, plain):
        train(store, gradients, settings, range(2))
        gradients.missing = frozenset({0})
        train(store, gradients, settings, range(2, 4))
        gradients.missing = frozenset()
        train(store, gradients, settings, range(4, 6))
    for ours, theirs in zip(mixed[0].views, plain[0].views, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("missing", [frozenset[int](), frozenset({1})], ids=["whole", "without one"])
def test_copies_for_sleeping_workers_have_the_weights_after_the_step(
    monkeypatch: pytest.MonkeyPatch, name: str, missing: frozenset[int]
) -> None:
    monkeypatch.setattr(pieces_module, "SIZE", 8)
    store, gradients, settings = build(name)
    for flat in gradients.flats:
        flat.normal_()
    gradients.missing = missing
    copies = [torch.zeros_like(store.weights) for _ in range(2)]
    before = store.weights.clone()
    store.apply(gradients, settings, 1.0, copies=copies)
    assert not torch.equal(store.weights, before)
    assert all(torch.equal(copy, store.weights) for copy in copies)


def test_the_number_of_cores_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SIZE", 8)
    monkeypatch.setattr("paceline.store.parameters.MANY_THREADS_BYTES", 0)
    monkeypatch.setattr("paceline.store.parameters.CHUNK", 16)
    results = []
    for cores in (1, 2, 5):
        store, gradients, settings = build("AdamW")
        store.use_cores(cores)
        train(store, gradients, settings, range(3))
        results.append((store.weights.clone(), store.norm(gradients)))
    assert all(torch.equal(weights, results[0][0]) and norm == results[0][1] for weights, norm in results)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_state_of_parameters_that_are_cut_into_pieces_is_that_of_whole_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "SIZE", 16)
    cut, whole = build(name), build(name, fast=False)
    for store in (cut, whole):
        train(*store, range(3))
    ours, theirs = (export_state(store.optimizer) for store, _, _ in (cut, whole))
    torch.testing.assert_close(ours, theirs)


class Halves:
    """Pieces that cut a vector at a place."""

    def __init__(self, at: int) -> None:
        self.at = at

    def cut(self, flats: list[Tensor]) -> list[Tensor]:
        return [flats[0][: self.at], flats[0][self.at :]]


def test_views_by_piece_are_kept_until_the_pieces_are_others() -> None:
    memory, first, second = pieces_module.CutMemory([torch.arange(6)]), Halves(2), Halves(4)
    views = memory.in_pieces(first)  # type: ignore[arg-type]
    assert memory.in_pieces(first) is views  # type: ignore[arg-type]
    assert [view.tolist() for view in memory.in_pieces(second)] == [[0, 1, 2, 3], [4, 5]]  # type: ignore[arg-type]
