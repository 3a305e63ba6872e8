"""What the workers of a split model save: each its own part, under the names of the whole.

Parts are put together by the run's conductor, into the files that any run leaves: `weights.safetensors`, and
a checkpoint that knows nothing of how the model was split, so that it can be resumed split otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.parallel.messages import MeshState
from paceline.store.disk.checkpoint import Snapshot, check_optimizer, read_checkpoint

STATE = "mesh.json"


class Part(msgspec.Struct):
    """One worker's tensors by name, and where the run stood."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """By parameter and what it is to the optimizer: `0.weight.momentum_buffer`."""
    values: dict[str, Any]
    """The same for state that is not a tensor."""
    state: MeshState


def write_part(folder: Path, rank: int, part: Part) -> None:
    """Write it down."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(part.model, folder / f"{rank}.model.safetensors")
    save_file(part.optimizer, folder / f"{rank}.optimizer.safetensors")
    state = msgspec.structs.replace(part.state, optimizer=part.values)
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(state))


def read_parts(folder: Path) -> Snapshot:
    """All that are there, as one."""
    model: dict[str, Tensor] = {}
    optimizer: dict[str, Tensor] = {}
    states = [
        msgspec.json.decode(path.read_bytes(), type=MeshState) for path in sorted(folder.glob("*.json"))
    ]
    for path in sorted(folder.glob("*.model.safetensors")):
        model |= load_file(path)
    for path in sorted(folder.glob("*.optimizer.safetensors")):
        optimizer |= load_file(path)
    values = {name: value for state in states for name, value in state.optimizer.items()}
    whole = msgspec.structs.replace(states[0], optimizer=values)
    return Snapshot(model, optimizer, STATE, msgspec.json.format(msgspec.json.encode(whole)))


def read_mesh_checkpoint(folder: Path) -> Part:
    """A checkpoint of a split model, whole."""
    state, model, optimizer = read_checkpoint(folder, STATE, MeshState)
    return Part(model, optimizer, state.optimizer, state)


def export_optimizer(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimizer remembers of parameters, under their names."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for name, parameter in named:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach().clone().contiguous()
            else:
                values[f"{name}.{key}"] = value
    return tensors, values


def import_optimizer(
    folder: Path, part: Part, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]
) -> None:
    """Let an optimizer remember what it did."""
    check_optimizer(folder, part.state.stepped_by, optimizer, part.optimizer)
    everything = {**part.optimizer, **part.values}
    for name, parameter in named:
        found = dict(_below(name, everything))
        if found:
            optimizer.state[parameter] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()
            }


def _below(name: str, everything: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    start = f"{name}."
    for key, value in everything.items():
        rest = key.removeprefix(start)
        if key.startswith(start) and "." not in rest:
            yield rest, value
