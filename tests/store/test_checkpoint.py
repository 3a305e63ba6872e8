"""What a run needs to go on, on disk: whole or not at all, and refused when it is not right."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from paceline.errors import TraceError
from paceline.store.disk.checkpoint import (
    RunState,
    Snapshot,
    load_checkpoint,
    model_state,
    save_weights,
    snapshot,
    write_checkpoint,
)
from paceline.store.disk.folders import saved_in
from paceline.store.layout import describe
from paceline.store.optimizers import describe_optimizer
from paceline.store.parameters import Gradients, ParameterStore


class Net(nn.Module):
    """A tied weight, channels_last, a buffer, and what else is trained outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


class Desk:
    """A store with its memory."""

    def __init__(self, model: nn.Module, cls: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        owned = [*model.parameters(), nn.Parameter(torch.ones(2))]
        self.layout = describe(model, owned)
        optimizer = cls(owned, lr=0.1)  # type: ignore[call-arg]
        spec = describe_optimizer(optimizer, {id(p): i for i, p in enumerate(owned)})
        self.store = ParameterStore(
            self.layout, spec, torch.zeros(self.layout.weights_bytes, dtype=torch.uint8)
        )
        self.segment = torch.zeros(self.layout.segment_bytes, dtype=torch.uint8)
        self.settings = [group.settings for group in spec.groups]

    def step(self, seed: int) -> None:
        gradients = Gradients(self.layout, torch.zeros(self.layout.segment_bytes, dtype=torch.uint8))
        generator = torch.Generator().manual_seed(seed)
        for view in gradients.views:
            view.copy_(torch.randn(view.shape, generator=generator))
        self.store.apply(gradients, self.settings, 1.0)

    def taken(self) -> Snapshot:
        stands: dict[str, Any] = {"digest": self.layout.digest(), "stepped_by": self.store.stepped_by}
        state = RunState(version=7, samples=28, units=28, budget={"opened": 1}, optimizer={}, **stands)
        return snapshot(self.store, self.segment, state)

    def save(self, folder: Path) -> None:
        write_checkpoint(folder, self.taken())


def test_a_store_that_was_saved_goes_on_bit_for_bit(tmp_path: Path) -> None:
    desk, again = Desk(Net()), Desk(Net())
    for seed in range(3):
        desk.step(seed)
    desk.save(tmp_path / "checkpoint")
    state, _ = load_checkpoint(tmp_path / "checkpoint", again.store)
    assert (state.version, state.samples, state.budget) == (7, 28, {"opened": 1})
    for seed in range(3, 6):
        desk.step(seed)
        again.step(seed)
    assert torch.equal(desk.store.weights, again.store.weights)


def test_buffers_come_back(tmp_path: Path) -> None:
    desk = Desk(Net())
    for number, view in enumerate(desk.layout.buffer_views(desk.segment)):
        view.fill_(number + 1)
    desk.save(tmp_path / "checkpoint")
    _, buffers = load_checkpoint(tmp_path / "checkpoint", Desk(Net()).store)
    assert {name: set(b.flatten().tolist()) for name, b in buffers.items()} == {
        slot.name: {number + 1} for number, slot in enumerate(desk.layout.buffers)
    }


def test_saved_weights_load_into_a_fresh_model_and_hold_nothing_else(tmp_path: Path) -> None:
    model = Net()
    desk = Desk(model)
    for view, parameter in zip(desk.store.views, [*model.parameters(), torch.ones(2)], strict=True):
        view.copy_(parameter.detach())
    save_weights(tmp_path / "w.safetensors", model_state(desk.layout, desk.store.views, desk.segment))
    saved = load_file(tmp_path / "w.safetensors")
    fresh = Net()
    fresh.load_state_dict(saved, strict=True)
    assert torch.equal(fresh.conv.weight, model.conv.weight)
    assert torch.equal(saved["one.weight"], saved["two.weight"])
    assert not list(tmp_path.glob("*.partial"))


def test_a_new_checkpoint_replaces_the_old_one_whole(tmp_path: Path) -> None:
    desk = Desk(Net())
    folder = tmp_path / "checkpoint"
    desk.save(folder)
    (folder / "left over").touch()
    desk.step(0)
    desk.save(folder)
    assert {path.name for path in folder.iterdir()} == {
        "checksums.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_whoever_is_killed_between_two_renames_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, folder = Desk(Net()), tmp_path / "checkpoint"
    desk.save(folder)
    before = desk.store.weights.clone()
    desk.step(0)
    renamed: list[object] = []

    def first_only(source: Path, target: Path) -> None:
        if renamed:
            raise KeyboardInterrupt
        renamed.append(source.rename(target))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", first_only)
        with pytest.raises(KeyboardInterrupt):
            desk.save(folder)
    found, again = saved_in(tmp_path), Desk(Net())
    assert found is not None
    assert not folder.exists()
    load_checkpoint(found, again.store)
    assert torch.equal(again.store.weights, before)
    desk.save(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"], "the next one leaves nothing over"


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    desk, folder = Desk(Net()), tmp_path / "checkpoint"
    desk.save(folder)
    before = desk.store.weights.clone()
    desk.step(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # what is left of it, as far as this process goes
    try:
        with pytest.raises(Exception, match="too large"):
            desk.save(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    again = Desk(Net())
    load_checkpoint(folder, again.store)
    assert torch.equal(again.store.weights, before)


def test_a_snapshot_is_of_one_moment_and_disturbs_nothing(tmp_path: Path) -> None:
    """Whether the optimizer's state is in pieces or not."""
    desk, undisturbed, again = Desk(Net()), Desk(Net()), Desk(Net())
    undisturbed.store.weights.copy_(desk.store.weights)
    for seed in range(3):
        desk.step(seed)
        undisturbed.step(seed)
    taken = desk.taken()
    for seed in range(3, 6):
        desk.step(seed)
        undisturbed.step(seed)
    assert torch.equal(desk.store.weights, undisturbed.store.weights)
    write_checkpoint(tmp_path / "checkpoint", taken)
    load_checkpoint(tmp_path / "checkpoint", again.store)
    for seed in range(3, 6):
        again.step(seed)
    assert torch.equal(desk.store.weights, again.store.weights)


def test_what_another_optimizer_remembers_is_refused_by_name(tmp_path: Path) -> None:
    desk, other = Desk(Net()), Desk(Net(), torch.optim.SGD)
    before = other.store.weights.clone()
    desk.step(0)
    desk.save(tmp_path / "checkpoint")
    with pytest.raises(TraceError, match="has the state of AdamW, but the script now steps with SGD"):
        load_checkpoint(tmp_path / "checkpoint", other.store)
    assert torch.equal(other.store.weights, before)


def test_an_optimizer_that_remembers_nothing_may_be_replaced(tmp_path: Path) -> None:
    plain, other = Desk(Net(), torch.optim.SGD), Desk(Net())
    plain.step(0)
    plain.save(tmp_path / "checkpoint")
    load_checkpoint(tmp_path / "checkpoint", other.store)
    assert torch.equal(other.store.weights, plain.store.weights)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    Desk(Net()).save(folder)
    path = folder / name
    data = path.read_bytes()
    for damaged in (b"", data[: len(data) // 3], b"\xff" * 50):
        path.write_bytes(damaged)
        with pytest.raises(TraceError, match="is damaged"):
            load_checkpoint(folder, Desk(Net()).store)
    path.unlink()
    with pytest.raises(TraceError, match=f"{name} is missing"):
        load_checkpoint(folder, Desk(Net()).store)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    Desk(Net()).save(tmp_path / "checkpoint")
    with pytest.raises(TraceError, match="belongs to another model"):
        load_checkpoint(tmp_path / "checkpoint", Desk(nn.Linear(3, 3)).store)
