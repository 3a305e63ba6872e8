"""Weights and the state of a run on disk: safetensors and plain JSON, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import TraceError
from paceline.store.disk.folders import partial_of, previous_of
from paceline.store.layout import Layout
from paceline.store.optimizers import import_state
from paceline.store.parameters import ParameterStore

VERSION = 1
T = TypeVar("T")


class SavedRule(msgspec.Struct, frozen=True):
    """A protocol, and what it remembers: of use only to the same protocol, set the same."""

    protocol: str
    settings: dict[str, Any]
    memory: dict[str, Any]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stood, apart from its tensors."""

    checkpoint: int = VERSION
    digest: str
    version: int
    samples: int
    units: int
    budget: dict[str, Any] | None
    optimizer: dict[str, Any]
    """Optimizer state that is not a tensor."""
    stepped_by: str = ""
    """The optimizer's class; empty in checkpoints that do not tell."""
    pushes: int = 0
    batches: int | None = None
    """Of the loader, in these pushes; None in checkpoints that do not tell."""
    rule: SavedRule | None = None
    peers: int | None = None
    """How many peers have files of their own beside this one; None: there are none."""
    one_model: bool = False
    """Whether these have one model and optimizer for all, which are here and not in their files."""
    adjusted: dict[str, float] = {}
    """Factors on the optimizer's settings that the protocol asked for."""
    workers: dict[str, dict[str, Any]] = {}
    """Where each worker of a paced run stood itself, by rank: random numbers and schedulers."""


def model_state(layout: Layout, weights: list[Tensor], segment: Tensor | None) -> dict[str, Tensor]:
    """What `model.load_state_dict` takes: parameters under all their names, and buffers."""
    named = dict(zip((slot.name for slot in layout.parameters), weights, strict=True))
    named |= {alias: named[name] for alias, name in layout.aliases.items()}
    state = {name: tensor for name, tensor in named.items() if not name.startswith("optimizer.extra.")}
    if segment is not None:
        state |= zip((slot.name for slot in layout.buffers), layout.buffer_views(segment), strict=True)
    return {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}


def save_weights(path: Path, state: dict[str, Tensor]) -> None:
    """Write model weights; a reader sees the old file or the new one, never half of it."""
    partial = path.with_suffix(".partial")
    save_file(state, partial)
    os.replace(partial, path)


class Snapshot(NamedTuple):
    """A run at one moment, in memory of its own: it can be written down while the run goes on."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    name: str
    """Of the file for the rest."""
    state: bytes
    beside: bool = False
    """Whether workers have put files of their own where it is made."""


def snapshot(store: ParameterStore, segment: Tensor | None, state: RunState) -> Snapshot:
    """Everything needed to go on, as it stands now."""
    tensors, values = store.export()
    model = {slot: t.contiguous().clone() for slot, t in store.named_weights()}
    return pack(model | buffers_of(store.layout, segment), tensors, values, state)


def pack(
    model: dict[str, Tensor], tensors: dict[str, Tensor], values: dict[str, Any], state: RunState
) -> Snapshot:
    """Copies of weights, buffers and the optimizer's state, and the rest, as one."""
    whole = msgspec.structs.replace(state, optimizer=values)
    text = msgspec.json.format(msgspec.json.encode(whole))
    return Snapshot(model, tensors, "state.json", text, beside=state.peers is not None)


def write_checkpoint(folder: Path, taken: Snapshot) -> None:
    """Write it down, whole or not at all; the checkpoint before stays until this one is on the disk."""
    partial = partial_of(folder)
    if not taken.beside:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    save_file(taken.model, partial / "model.safetensors")
    save_file(taken.optimizer, partial / "optimizer.safetensors")
    (partial / taken.name).write_bytes(taken.state)
    for path in (*partial.iterdir(), partial):
        _to_disk(path)
    _change_places(partial, folder)
    _to_disk(folder.parent)


def remove_checkpoint(folder: Path) -> None:
    """Leave nothing of it: the run has finished."""
    for each in (folder, partial_of(folder), previous_of(folder)):
        shutil.rmtree(each, ignore_errors=True)


def _change_places(partial: Path, folder: Path) -> None:
    """Two renames, since a folder cannot take another's place: between them the old one is `previous`."""
    previous = previous_of(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(partial, folder)
    shutil.rmtree(previous, ignore_errors=True)


def _to_disk(path: Path) -> None:
    """Not in memory only: a power cut must not leave names without their contents."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def load_checkpoint(folder: Path, store: ParameterStore) -> tuple[RunState, dict[str, Tensor]]:
    """Put weights and optimizer state back; returns the rest, buffers included."""
    state, model, optimizer = read_checkpoint(folder, "state.json", RunState)
    if state.digest != store.layout.digest():
        raise other_model(folder)
    check_optimizer(folder, state.stepped_by, store.optimizer, optimizer)
    for name, view in store.named_weights():
        view.copy_(model.pop(name))
    import_state(store.optimizer, optimizer, state.optimizer)
    return state, model


def other_model(folder: Path) -> TraceError:
    """The checkpoint is fine, the model is not the one it was taken of."""
    return TraceError(
        f"the checkpoint at {folder} belongs to another model. Resume it with the script it came from."
    )


def check_optimizer(
    folder: Path, was: str, optimizer: torch.optim.Optimizer, remembered: dict[str, Tensor]
) -> None:
    """What one optimizer remembers is of no use to another; one that remembers nothing may be replaced."""
    now = type(optimizer).__name__
    if was and was != now and remembered:
        raise TraceError(
            f"the checkpoint at {folder} has the state of {was}, but the script now steps with {now}. "
            f"Resume it with {was}, or begin a new run."
        )


def read_checkpoint(folder: Path, name: str, kind: type[T]) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    """What the files of a checkpoint hold: the state `name`, the model, the optimizer."""
    return _read(folder, (name, "model.safetensors", "optimizer.safetensors"), kind)


def read_files(folder: Path, stem: str, kind: type[T]) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    """The same of a worker that keeps its own."""
    return _read(folder, (f"{stem}.json", f"{stem}.safetensors", f"{stem}.optimizer.safetensors"), kind)


def _read(
    folder: Path, files: tuple[str, str, str], kind: type[T]
) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    for file in files:
        if not (folder / file).is_file():
            raise TraceError(f"no checkpoint to resume at {folder}: {file} is missing.")
    name, model, optimizer = files
    try:
        state = msgspec.json.decode((folder / name).read_bytes(), type=kind)
        return state, load_file(folder / model), load_file(folder / optimizer)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError, SafetensorError) as error:
        raise TraceError(
            f"the checkpoint at {folder} is damaged: {error}. Resume from another one."
        ) from None


def buffers_of(layout: Layout, segment: Tensor | None) -> dict[str, Tensor]:
    """A copy of a worker's buffers, by name."""
    if segment is None:
        return {}
    views = layout.buffer_views(segment)
    return {slot.name: v.contiguous().clone() for slot, v in zip(layout.buffers, views, strict=True)}
