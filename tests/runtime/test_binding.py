"""A model tied to flat memory: gradients land there, and what has none is told, whatever a script does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.fabric.private_view import PrivateView
from paceline.fabric.segment import Segment
from paceline.runtime.worker.model.binding import Binding
from paceline.store.layout import Models
from paceline.store.together import Together


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(3, 2), nn.Linear(3, 2)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        self.count += 1
        return self.used(x) + (self.other(x) if other else 0)


USED, ALL = {0, 1}, {0, 1, 2, 3}


def tied(coarse: str = "", **way: bool) -> tuple[Heads, Binding, Segment]:
    """`coarse`: which of its layers have bfloat16."""
    model = Heads()
    if coarse:
        (model if coarse == "both" else model.other).bfloat16()
    binding = Binding(model, torch.optim.SGD(model.parameters(), lr=0.1))
    initial = binding.initial()
    layout = binding.layout
    weights = Segment.create(layout.weights_bytes, "weights")
    weights.bytes.copy_(initial.bytes[: layout.weights_bytes])
    segment = Segment.create(layout.segment_bytes, "segment")
    binding.attach(segment, weights, **way)
    return model, binding, segment


def backward(model: nn.Module, other: bool = False) -> None:
    model(torch.ones(4, 3), other).sum().backward()


def present(binding: Binding) -> set[int]:
    return ALL - set(binding.collect())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_number_that_is_not_finite_is_seen_before_the_push(bad: float) -> None:
    model, binding, _ = tied()
    backward(model)
    binding.collect()
    assert binding.finite()
    assert model.used.weight.grad is not None
    model.used.weight.grad[0, 1] = bad
    assert not binding.finite()
    assert binding.bad_parameter() == "used.weight"


def test_values_stay_and_gradients_and_buffers_live_in_the_segment() -> None:
    torch.manual_seed(0)
    expected = {name: p.detach().clone() for name, p in Heads().named_parameters()}
    torch.manual_seed(0)
    model, binding, segment = tied()
    for name, p in model.named_parameters():
        assert torch.equal(p, expected[name])
    backward(model, other=True)
    assert present(binding) == ALL
    flat = torch.cat([view.flatten() for view in binding.layout.gradient_views(segment.bytes)])
    assert torch.equal(flat, torch.full((16,), 4.0))
    assert float(binding.layout.buffer_views(segment.bytes)[0]) == 1


ZEROS: dict[str, Callable[[nn.Module, Binding], None]] = {
    "flat": lambda model, binding: binding.zero(True),
    "model": lambda model, binding: model.zero_grad(),
    "by hand": lambda model, binding: [setattr(p, "grad", None) for p in model.parameters()] and None,
}


@pytest.mark.parametrize("zero", ZEROS)
def test_a_parameter_that_took_no_part_is_missing(zero: str) -> None:
    model, binding, segment = tied()
    for other in (False, True, False, False, True):
        backward(model, other)
        assert present(binding) == (ALL if other else USED)
        views = binding.layout.gradient_views(segment.bytes)
        assert bool(views[2].any()) == other
        assert float(views[0].sum()) == 24.0
        binding.fresh()
        ZEROS[zero](model, binding)


@pytest.mark.parametrize("times", [1, 2])
def test_clipping_does_not_make_a_missing_gradient_a_gradient(times: int) -> None:
    model, binding, _ = tied()
    for _ in range(2):
        backward(model)
        for _ in range(times):
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        assert present(binding) == USED
        binding.fresh()
        binding.zero(True)


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_gradients_zeroed_and_not_set_to_none_take_part_as_in_plain_pytorch(how: str) -> None:
    model, binding, _ = tied()
    for other, expected in ((False, USED), (True, ALL), (False, ALL)):
        backward(model, other)
        assert present(binding) == expected
        binding.fresh()
        if how == "optimizer":
            binding.zero(False)
        else:
            model.zero_grad(set_to_none=False)


def test_gradients_add_up_over_several_backward_passes() -> None:
    model, binding, segment = tied()
    backward(model)
    backward(model, other=True)
    assert present(binding) == ALL
    views = binding.layout.gradient_views(segment.bytes)
    assert (float(views[0].sum()), float(views[2].sum())) == (48.0, 24.0)


def test_a_gradient_that_was_replaced_is_copied_and_bound_again() -> None:
    model, binding, segment = tied()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    model.other.weight.grad = torch.ones(2, 3).to_sparse()
    assert present(binding) == ALL
    views = binding.layout.gradient_views(segment.bytes)
    assert [set(view.flatten().tolist()) for view in views] == [{7.0}, {7.0}, {1.0}, {7.0}]
    backward(model)
    assert float(views[0].sum()) == 7.0 * 6 + 24.0


def test_weights_that_were_replaced_are_bound_again() -> None:
    model, binding, _ = tied()
    kept = model.used.weight.detach().clone()
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    binding.fresh()
    assert torch.equal(model.used.weight, kept)


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        Binding(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_on_several_devices_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="several devices"):
        Binding(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_model_on_the_cpu_stays_in_the_shared_memory_itself() -> None:
    model, binding, segment = tied()
    near, weights = binding.stay_near()
    assert near.data_ptr() == segment.bytes.data_ptr()
    backward(model, other=True)
    before = weights.clone()
    binding.collect()
    binding.fresh()
    binding.hand_back()
    assert torch.equal(weights, before)


def test_a_write_to_the_view_of_a_stores_weights_is_named_and_gone_with_the_next_ones() -> None:
    """Whatever torch counts: `p.data` moves no counter."""
    model, binding, _ = tied(private=True)
    before = model.other.weight.detach().clone()
    assert binding.overwritten() is None
    model.other.weight.data.clamp_(-0.01, 0.01)
    assert binding.overwritten() == ("other.weight", True)
    assert binding.overwritten() == ("other.weight", True)
    binding.fresh()
    assert binding.overwritten() is None
    assert torch.equal(model.other.weight, before)


def test_weights_that_are_replaced_are_a_write_unless_they_are_the_same() -> None:
    model, binding, _ = tied(private=True)
    model.other.weight.data = model.other.weight.data.clone()
    assert binding.overwritten() is None
    model.other.weight.data = model.other.weight.data.clamp(-0.01, 0.01)
    assert binding.overwritten() == ("other.weight", True)


@pytest.mark.parametrize("way", [{"private": True}, {"own": True}], ids=str)
def test_a_perturbation_that_is_taken_back_is_no_write_though_it_leaves_rounding(
    way: dict[str, bool],
) -> None:
    model, binding, _ = tied(**way)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.0123)
        assert binding.overwritten() is not None
        for p in model.parameters():
            p.sub_(0.0123)
    assert not all(torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))
    assert binding.overwritten() is None


@pytest.mark.parametrize("way", [{"private": True}, {"own": True}], ids=str)
@pytest.mark.parametrize("coarse", ["both", "the other"])
def test_a_write_that_is_small_beside_16_bit_numbers_is_named(coarse: str, way: dict[str, bool]) -> None:
    """What counts as rounding goes by the type of the parameter itself, and 16 bits have few units."""
    model, binding, _ = tied(coarse, **way)
    with torch.no_grad():
        model.used.weight.add_(0.03)
    assert binding.overwritten() == ("used.weight", True)


@pytest.mark.parametrize("way", [{"private": True}, {"own": True}], ids=str)
def test_weights_that_are_no_numbers_any_more_are_no_write(way: dict[str, bool]) -> None:
    model, binding, _ = tied(**way)
    with torch.no_grad():
        model.used.weight.fill_(float("nan"))
    binding._weights.bytes.copy_(binding._near_weights)  # type: ignore[union-attr]
    assert binding.overwritten() is None


def test_a_parameter_in_the_place_of_another_is_named() -> None:
    model, binding, _ = tied(private=True)
    assert binding.stranger(model) is None
    model.used.weight = nn.Parameter(model.used.weight.detach() * 2)
    assert binding.stranger(model) == "used.weight"


def test_a_write_to_weights_of_a_workers_own_is_named_in_its_first_steps() -> None:
    model, binding, _ = tied(own=True)
    assert binding.overwritten() is None
    model.other.weight.data.clamp_(-0.01, 0.01)
    assert binding.overwritten() == ("other.weight", True)


def test_where_the_system_tells_no_pages_a_write_is_found_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, binding, _ = tied(private=True)
    monkeypatch.setattr(PrivateView, "written", lambda self: None)
    model.other.weight.data.clamp_(-0.01, 0.01)
    assert binding.overwritten() == ("other.weight", True)


def test_what_was_computed_before_fresh_weights_has_no_gradient_any_more() -> None:
    """As after a plain step: the numbers it would need are gone."""
    model, binding, _ = tied()
    kept = (model(torch.ones(4, 3, requires_grad=True)) ** 2).sum()
    binding.fresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    backward(model)


def test_a_step_of_one_optimizer_leaves_graphs_through_models_of_others_alone() -> None:
    mine, other = nn.Linear(3, 3), nn.Linear(3, 3)
    steps = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (mine, other)]
    model = Models([mine, other], [*mine.parameters(), *other.parameters()])
    binding = Binding(model, Together(steps))
    binding.attach(
        Segment.create(binding.layout.segment_bytes, "segment"),
        Segment.create(binding.layout.weights_bytes, "weights"),
    )
    kept = [each(torch.ones(4, 3, requires_grad=True)).sum() for each in (mine, other)]
    binding.choose(0)
    binding.fresh()
    kept[1].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept[0].backward()


@pytest.mark.parametrize("what", ["buffer", "gradient"])
def test_a_model_that_is_moved_after_prepare_is_refused(what: str) -> None:
    """To another device; the one that there is everywhere is `meta`."""
    model, binding, _ = tied()
    backward(model)
    if what == "buffer":
        model.count = model.count.to("meta")
    else:
        binding._gradients[0] = torch.empty_like(binding._gradients[0], device="meta")
    with pytest.raises(
        ConfigError, match=r"was on cpu when the model was prepared, and is on meta now. Move"
    ):
        binding.adopt_buffers() if what == "buffer" else binding.collect()
