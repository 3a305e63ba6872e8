"""Weights and the state of a run on disk: safetensors and plain JSON, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.errors import TraceError
from paceline.store.layout import Layout
from paceline.store.optimizers import export_state, import_state
from paceline.store.parameters import ParameterStore

VERSION = 1
T = TypeVar("T")


class Rule(msgspec.Struct, frozen=True):
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
    rule: Rule | None = None
    peers: int | None = None
    """How many peers have files of their own beside this one; None: there are none."""
    one_model: bool = False
    """Whether these have one model and optimizer for all, which are here and not in their files."""
    adjusted: dict[str, float] = {}
    """Factors on the optimizer's settings that the protocol asked for."""


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


def partial_of(folder: Path) -> Path:
    """Where a checkpoint is made before it takes its place."""
    return folder.with_name(folder.name + ".partial")


def save_checkpoint(folder: Path, store: ParameterStore, segment: Tensor | None, state: RunState) -> None:
    """Write everything needed to go on."""
    partial = partial_of(folder)
    if state.peers is None:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    tensors, values = export_state(store.optimizer)
    save_file(
        {slot: t.contiguous().clone() for slot, t in store.named_weights()} | _buffers(store, segment),
        partial / "model.safetensors",
    )
    save_file(tensors, partial / "optimizer.safetensors")
    state = msgspec.structs.replace(state, optimizer=values, stepped_by=type(store.optimizer).__name__)
    (partial / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(state)))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


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


def _buffers(store: ParameterStore, segment: Tensor | None) -> dict[str, Tensor]:
    if segment is None:
        return {}
    views = store.layout.buffer_views(segment)
    return {slot.name: v.contiguous().clone() for slot, v in zip(store.layout.buffers, views, strict=True)}
