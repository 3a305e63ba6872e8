"""Spans of flat memory: together they are all trained weights, each once, and each of one group."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.store.corrections import spans as module
from paceline.store.corrections.spans import Span, Vectors, spans
from paceline.store.layout import Layout, describe
from paceline.store.optimizers import OptimizerGroup, OptimizerSpec


def model_of(*groups: tuple[int, ...]) -> tuple[Layout, OptimizerSpec]:
    """Five tensors of float32 and one of float64, of which 16 and 8 elements fill a boundary."""
    sizes = [(20,), (3, 16), (16,), (0,), (40,)]
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    model.append(torch.zeros(9, dtype=torch.float64))
    layout = describe(model, list(model.parameters()))
    assert [slot.name for slot in layout.trained] == [str(number) for number in range(6)]
    return layout, OptimizerSpec("SGD", tuple(OptimizerGroup(group, {}) for group in groups))


def test_neighbours_of_a_group_are_one_with_the_padding_in_between() -> None:
    layout, spec = model_of((0, 1, 2, 3, 4, 5))
    assert spans(layout, spec) == [Span(0, 0, slice(0, 144)), Span(0, 1, slice(0, 16))]


def test_a_span_is_of_one_group() -> None:
    layout, spec = model_of((0, 4, 5), (1, 2, 3))
    assert spans(layout, spec) == [
        Span(0, 0, slice(0, 32)),
        Span(1, 0, slice(32, 96)),
        Span(0, 0, slice(96, 144)),
        Span(0, 1, slice(0, 16)),
    ]


def test_what_is_missing_is_left_out_and_joins_nobody() -> None:
    layout, spec = model_of((0, 1, 2, 3, 4, 5))
    assert spans(layout, spec, missing=[1, 5]) == [Span(0, 0, slice(0, 32)), Span(0, 0, slice(80, 144))]


def test_large_spans_are_cut_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIZE", 64)
    layout, spec = model_of((0, 1, 2, 3, 4, 5))
    parts = [span.part for span in spans(layout, spec)]
    assert parts == [slice(0, 64), slice(64, 128), slice(128, 144), slice(0, 16)]


def test_a_span_of_a_vector_is_where_the_tensors_lie() -> None:
    layout, spec = model_of((0, 4, 5), (1, 2, 3))
    vectors = Vectors(layout)
    for span in spans(layout, spec):
        vectors.part(span).fill_(span.group + 1.0)
    assert [float(view.double().mean()) for view in vectors.views if view.numel()] == [
        1.0,
        2.0,
        2.0,
        1.0,
        1.0,
    ]
