"""Where tensors lie: weights and gradients side by side, nothing overlaps, padding stays zero."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from paceline.store.layout import ALIGN, Layout, describe


class Net(nn.Module):
    """Odd sizes, two dtypes, a frozen part, a tied weight, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.double = nn.Linear(3, 5, bias=False).double()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm2d(4)
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def net() -> tuple[Net, Layout]:
    model = Net()
    return model, describe(model, [p for p in model.parameters() if p.requires_grad])


def memory(size_bytes: int) -> Tensor:
    return torch.zeros(size_bytes, dtype=torch.uint8)


def test_every_tensor_has_a_place_of_its_own_on_a_boundary() -> None:
    _, layout = net()
    for spans, end in (
        ([(s.offset, s.size_bytes) for s in layout.parameters], layout.weights_bytes),
        (
            [(s.gradient or 0, s.size_bytes) for s in layout.trained]
            + [(s.offset, s.size_bytes) for s in layout.buffers],
            layout.segment_bytes,
        ),
    ):
        spans.sort()
        assert all(start % ALIGN == 0 for start, _ in spans)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= end


def test_the_gradients_of_a_dtype_are_one_vector_parallel_to_their_weights() -> None:
    _, layout = net()
    assert [region.dtype for region in layout.regions] == ["torch.float32", "torch.float64"]
    for region in layout.regions:
        inside = [s for s in layout.trained if s.dtype == region.dtype]
        for slot in inside:
            assert slot.gradient is not None
            assert slot.offset - region.weights == slot.gradient - region.gradients
        assert region.size_bytes >= sum(slot.size_bytes for slot in inside)


def test_views_have_the_models_shapes_and_strides() -> None:
    model, layout = net()
    named = dict(model.named_parameters())
    views = layout.weight_views(memory(layout.weights_bytes))
    for slot, view in zip(layout.parameters, views, strict=True):
        assert (view.shape, view.dtype) == (named[slot.name].shape, named[slot.name].dtype)
        assert view.stride() == named[slot.name].stride()
    conv = views[[slot.name for slot in layout.parameters].index("conv.weight")]
    assert conv.is_contiguous(memory_format=torch.channels_last)


def test_writing_all_views_leaves_the_padding_zero() -> None:
    _, layout = net()
    weights, segment = memory(layout.weights_bytes), memory(layout.segment_bytes)
    for view in layout.weight_views(weights):
        view.fill_(1)
    for view in layout.gradient_views(segment):
        view.fill_(1)
    for region in layout.regions:
        size = sum(torch.Size(s.shape).numel() for s in layout.trained if s.dtype == region.dtype)
        for flat in (region.flat(weights, region.weights), region.flat(segment, region.gradients)):
            assert int(flat.sum()) == size


def test_a_view_counts_its_own_versions() -> None:
    """That is how a gradient that backward did not touch is told."""
    _, layout = net()
    segment = memory(layout.segment_bytes)
    first, second, *_ = layout.gradient_views(segment)
    before = second._version
    first.add_(1)
    layout.regions[0].flat(segment, layout.regions[0].gradients).zero_()
    assert second._version == before
    assert float(first.sum()) == 0


def test_a_tied_parameter_has_one_place_and_two_names() -> None:
    _, layout = net()
    names = [slot.name for slot in layout.parameters]
    assert "tied.weight" not in names
    assert layout.aliases == {"tied.weight": "first.weight"}


def test_frozen_parameters_have_no_gradient_and_only_lasting_buffers_are_kept() -> None:
    _, layout = net()
    assert {slot.name for slot in layout.parameters if slot.gradient is None} == {
        "frozen.weight",
        "frozen.bias",
    }
    assert {slot.name for slot in layout.buffers} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_a_parameter_with_holes_is_laid_out_densely() -> None:
    model = nn.Module()
    model.w = nn.Parameter(torch.zeros(4, 6)[:, ::2])
    layout = describe(model, [model.w])
    assert layout.parameters[0].stride == (3, 1)


def test_a_compiled_model_keeps_the_names_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plain = describe(model, list(model.parameters()))
    wrapped = nn.Module()
    wrapped._orig_mod = model  # as torch.compile does
    assert describe(wrapped, list(wrapped.parameters())).digest() == plain.digest()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Linear(2, 4), r"weight \[3, 2\] against weight \[4, 2\]"),
        (nn.Linear(2, 3, bias=False), "2 against 1 parameters"),
        (nn.Linear(2, 3).double(), "weight"),
    ],
)
def test_the_first_difference_of_two_models_is_named(other: nn.Module, words: str) -> None:
    model = nn.Linear(2, 3)
    one = describe(model, list(model.parameters()))
    two = describe(other, list(other.parameters()))
    assert one.digest() != two.digest()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(one.difference(two))
