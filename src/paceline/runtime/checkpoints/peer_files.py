"""A peer's own state on disk: its replica, its optimizer, what its protocol remembers, its random numbers.

Every worker writes its own files; there is no store that has them. Vectors go to safetensors, the rest
to plain JSON, in which what JSON cannot tell apart (tuples, parts, dictionaries by number) is marked.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.parts import Part
from paceline.protocols.core.peer import Me
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.runtime.checkpoints.step_settings import StepSettings
from paceline.runtime.checkpoints.worker_state import Mark, WorkerState
from paceline.store.disk.checkpoint import check_optimizer, read_files
from paceline.store.disk.tensor_files import save_tensors
from paceline.store.optimizers import export_state, import_state
from paceline.store.together import title
from paceline.store.vector import FlatVector

KINDS = ("agreed", "private")


class SavedPeerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker stood, apart from its tensors."""

    count: int
    epoch: int
    """Of its last batch."""
    memory: dict[str, dict[str, Any]]
    optimizer: dict[str, Any]
    stepped_by: str = ""
    """The optimizer's class; empty where it has none of its own."""
    random: RandomState
    schedules: tuple[int, ...] = ()
    """How often its prepared schedulers were stepped."""
    marks: tuple[Mark, ...] = ()
    """What else is known of each."""


def save_peer(
    folder: Path,
    me: Me,
    optimizer: torch.optim.Optimizer | None,
    buffers: list[Tensor],
    stand: WorkerState,
    settings: StepSettings,
) -> None:
    """Write a worker's files, at the end of an iteration and with nothing under way.

    Without an optimizer where the run has one model for all, and saves that and its optimizer itself.
    `settings`: what the optimizer remembers in its groups.
    """
    tensors: dict[str, Tensor] = {}
    memory = {
        kind: {name: _packed(value, f"{kind}.{name}", tensors) for name, value in vars(part).items()}
        for kind, part in _namespaces(me).items()
    }
    tensors |= {f"buffers.{i}": buffer.clone() for i, buffer in enumerate(buffers)}
    moments, values = ({}, {}) if optimizer is None else export_state(optimizer)
    if optimizer is not None:
        values |= settings.of(optimizer)
        _put(tensors, "parameters", me.parameters)
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(tensors, folder / f"rank{me.rank}.safetensors")
    save_tensors(moments, folder / f"rank{me.rank}.optimizer.safetensors")
    state = SavedPeerState(
        count=me.count,
        epoch=stand.epoch,
        memory=memory,
        optimizer=values,
        stepped_by="" if optimizer is None else title(optimizer),
        random=stand.random,
        schedules=stand.schedules,
        marks=stand.marks,
    )
    (folder / f"rank{me.rank}.json").write_bytes(msgspec.json.encode(state))


def load_peer(
    folder: Path,
    me: Me,
    optimizer: torch.optim.Optimizer | None,
    buffers: list[Tensor],
    settings: StepSettings,
) -> WorkerState:
    """Put everything back, once the protocol has started; where the worker itself stood."""
    state, tensors, moments = read_files(folder, f"rank{me.rank}", SavedPeerState)
    me.count = state.count
    if optimizer is not None:
        check_optimizer(folder, state.stepped_by, title(optimizer), moments)
        me.parameters[:] = _get(tensors, "parameters")
        import_state(optimizer, moments, settings.give(optimizer, state.optimizer))
    for i, buffer in enumerate(buffers):
        buffer.copy_(tensors[f"buffers.{i}"])
    for kind, space in _namespaces(me).items():
        for name, value in state.memory[kind].items():
            _restore(space, name, _unpacked(value, f"{kind}.{name}", tensors))
    return WorkerState(state.random, state.epoch, state.schedules, state.marks)


def _namespaces(me: Me) -> dict[str, SimpleNamespace]:
    return {kind: getattr(me, kind) for kind in KINDS}


def _restore(space: SimpleNamespace, name: str, value: Any) -> None:
    """A vector that the protocol has made anew keeps its place: the run may know it."""
    old = getattr(space, name, None)
    if isinstance(old, FlatVector) and isinstance(value, FlatVector):
        old[:] = value
    else:
        setattr(space, name, value)


def _packed(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case FlatVector():
            _put(tensors, key, value)
            return {"vector": key}
        case Part():
            return {"part": [list(value.tensors), value.size_bytes]}
        case list() | tuple():
            items = [_packed(each, f"{key}.{i}", tensors) for i, each in enumerate(value)]
            return {type(value).__name__: items}
        case dict():
            return {"dict": [[k, _packed(v, f"{key}.{k}", tensors)] for k, v in value.items()]}
        case None | bool() | int() | float() | str():
            return {"plain": value}
    raise ConfigError(f"the protocol remembers {key}, a {type(value).__name__}, which cannot be saved.")


def _unpacked(value: dict[str, Any], key: str, tensors: dict[str, Tensor]) -> Any:
    (kind, inner), *_ = value.items()
    match kind:
        case "vector":
            return _get(tensors, inner)
        case "part":
            return Part(tuple(inner[0]), inner[1])
        case "list" | "tuple":
            items = [_unpacked(each, f"{key}.{i}", tensors) for i, each in enumerate(inner)]
            return tuple(items) if kind == "tuple" else items
        case "dict":
            return {k: _unpacked(v, f"{key}.{k}", tensors) for k, v in inner}
    return inner


def _put(tensors: dict[str, Tensor], key: str, vector: Any) -> None:
    tensors |= {f"{key}:{i}": part.clone() for i, part in enumerate(vector.parts)}


def _get(tensors: dict[str, Tensor], key: str) -> FlatVector:
    count = sum(name.startswith(f"{key}:") for name in tensors)
    return FlatVector([tensors[f"{key}:{i}"].clone() for i in range(count)])
