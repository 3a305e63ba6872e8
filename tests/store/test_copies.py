"""Views of a worker's memory are made once, and hold on to nothing that is gone."""

from __future__ import annotations

import torch
from torch import nn

from paceline.store.layout import Layout, describe
from paceline.store.pieces import WeightCopies


def _layout() -> Layout:
    model = nn.Linear(8, 4)
    return describe(model, list(model.parameters()))


def test_the_same_memory_has_the_same_views() -> None:
    layout = _layout()
    copies, memory = WeightCopies(layout), torch.zeros(layout.weights_bytes, dtype=torch.uint8)
    views = copies.of(memory)
    assert copies.of(memory) is views
    memory.fill_(1)
    assert all(bool(flat.any()) for flat in views.flats)


def test_another_memory_has_its_own() -> None:
    layout = _layout()
    copies = WeightCopies(layout)
    one, two = (torch.zeros(layout.weights_bytes, dtype=torch.uint8) for _ in range(2))
    assert copies.of(one).flats[0].data_ptr() != copies.of(two).flats[0].data_ptr()


def test_what_is_gone_is_forgotten_and_its_number_can_be_anothers() -> None:
    layout = _layout()
    copies = WeightCopies(layout)
    for value in range(50):  # freed memory and identities are used again and again
        memory = torch.full((layout.weights_bytes,), value, dtype=torch.uint8)
        assert copies.of(memory).flats[0].data_ptr() == memory[layout.regions[0].weights :].data_ptr()
        del memory
    assert not copies._known
