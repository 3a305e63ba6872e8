"""DANA's memory in torch's terms: what a script saves, plain PyTorch goes on from, and vice versa."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.store.corrections.correction import Stride
from paceline.store.corrections.script_state import load, saved
from support.corrected import SIZE, Crew, close, noise

KINDS = [
    ("SGD", {"momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"momentum": 0.9, "maximize": True}),
    ("Adam", {"weight_decay": 0.01}),
    ("AdamW", {"betas": (0.8, 0.99)}),
    ("NAdam", {}),
]
WORKERS = 3


class Twin:
    """A store with DANA, and torch's optimizer on one flat parameter; both get the same gradients."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        self.crew = Crew("dana", name, workers=WORKERS, **settings)
        self.plain = nn.Parameter(self.crew.weights)
        self.optimizer = getattr(torch.optim, name)([self.plain], **{"lr": 0.1, **settings})

    def flush(self, seed: int) -> None:
        gradient = noise(seed)
        parts = [(rank, gradient, 1 / WORKERS) for rank in range(WORKERS)]
        self.crew.each(parts, Stride(1.0, 1 / WORKERS, WORKERS))

    def step(self, seed: int) -> None:
        self.plain.grad = noise(seed)
        self.optimizer.step()

    def saved(self) -> dict[str, Tensor]:
        """The store's, with what all parameters have of a kind in one vector."""
        tensors, values = saved(self.crew.store)
        assert not values
        names = {name.split(".", 1)[1] for name in tensors}
        parts = {name: [t for key, t in tensors.items() if key.endswith(f".{name}")] for name in names}
        return {name: torch.cat([each.flatten() for each in parts[name]]) for name in names}

    def load(self) -> None:
        """Let the store have what torch's optimizer remembers."""
        state, tensors = self.optimizer.state[self.plain], {}
        for name, value in state.items():
            whole = value.dim() > 0
            sizes = [view.numel() for view in self.crew.layout.weight_views(self.crew.store.weights)]
            shapes = [view.shape for view in self.crew.layout.weight_views(self.crew.store.weights)]
            parts = value.split(sizes) if whole else [value] * len(sizes)
            for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
                tensors[f"{number}.{name}"] = part.view(shape) if whole else part
        load(self.crew.store, (tensors, {}), range(WORKERS))


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_what_is_saved_is_what_torch_would_remember(name: str, settings: dict[str, Any]) -> None:
    twin = Twin(name, settings)
    for seed in range(5):
        twin.flush(seed)
        twin.step(seed)
    saved, torchs = twin.saved(), twin.optimizer.state[twin.plain]
    assert saved.keys() == torchs.keys()
    for key, value in torchs.items():
        close(saved[key].double(), value.double().expand(saved[key].shape))


@pytest.mark.parametrize(("name", "settings"), KINDS[:-1])
def test_what_is_loaded_is_gone_on_from_as_torch_does(name: str, settings: dict[str, Any]) -> None:
    twin = Twin(name, settings)
    for seed in range(5):
        twin.step(seed)
    for flat in twin.crew.store._flats:
        flat.zero_()
    twin.plain.data.zero_()
    twin.load()
    for seed in range(5, 8):
        twin.flush(seed)
        twin.step(seed)
        close(twin.crew.weights, twin.plain.detach())


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_nothing_is_lost_between_loading_and_saving(name: str, settings: dict[str, Any]) -> None:
    twin = Twin(name, settings)
    for seed in range(4):
        twin.step(seed)
    twin.load()
    saved, torchs = twin.saved(), twin.optimizer.state[twin.plain]
    for key, value in torchs.items():
        close(saved[key].double(), value.double().expand(saved[key].shape))


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_an_empty_state_is_a_new_beginning(name: str, settings: dict[str, Any]) -> None:
    twin, fresh = Twin(name, settings), Twin(name, settings)
    for seed in range(3):
        twin.flush(seed)
    load(twin.crew.store, ({}, {}), range(WORKERS))
    for ours, its in zip(twin.crew.store._flats, fresh.crew.store._flats, strict=True):
        ours.copy_(its)
    for each in (twin, fresh):
        each.flush(9)
        each.crew.push(1, noise(10), active=WORKERS)
    close(twin.crew.weights, fresh.crew.weights)
    close(twin.crew.flat(twin.crew.copies[1]), fresh.crew.flat(fresh.crew.copies[1]))


@pytest.mark.parametrize(("name", "settings"), KINDS)
def test_the_state_is_still_there_when_all_workers_have_left(name: str, settings: dict[str, Any]) -> None:
    twin = Twin(name, settings)
    twin.flush(0)
    before = twin.saved()
    for rank in range(WORKERS):
        twin.crew.store.forget(rank)
    after = twin.saved()
    assert before.keys() == after.keys()
    for key, value in before.items():
        close(after[key].double(), value.double())


def test_a_parameter_without_a_gradient_so_far_has_no_state() -> None:
    """As alone, where Adam counts a parameter's steps from its first gradient on."""
    crew = Crew("dana", "Adam", workers=1)
    gradient = torch.zeros(SIZE, dtype=torch.float64)
    gradient[:15] = 1.0
    crew.push(0, gradient)
    assert {name.split(".")[0] for name in saved(crew.store)[0]} == {"0"}


def test_a_correction_of_gradients_is_not_in_what_a_script_saves() -> None:
    crew = Crew("gap", momentum=0.9, workers=1)
    crew.store.apply(crew.gradients(noise(0)), crew.settings, 1.0)
    assert {name.split(".", 1)[1] for name in saved(crew.store)[0]} == {"momentum_buffer"}
