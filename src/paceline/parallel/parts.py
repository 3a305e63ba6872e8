"""What the workers of a split model save: each its own part, under the names of the whole.

Parts are put together by the run's conductor, into the files that any run leaves: `weights.safetensors`, and
a checkpoint that knows nothing of how the model was split, so that it can be resumed split otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.decoding import decode_json
from paceline.errors import RunError
from paceline.parallel.messages import MeshState
from paceline.parallel.pieces import TensorPiece
from paceline.store.disk.checkpoint import Snapshot, check_optimizer, read_checkpoint
from paceline.store.together import title

STATE = "mesh.json"
PARTS = "parts"
"""The folder in a run's where workers write them."""


class CheckpointPart(msgspec.Struct):
    """One worker's tensors by name, and where the run stood."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    """By parameter and what it is to the optimizer: `0.weight.momentum_buffer`."""
    values: dict[str, Any]
    """The same for state that is not a tensor."""
    state: MeshState
    pieces: dict[str, TensorPiece] = {}
    """Which of the tensors, the optimizer's included, are pieces of a larger one."""


class PartIndex(msgspec.Struct, frozen=True):
    """What stands beside a part's tensors."""

    state: MeshState
    pieces: dict[str, TensorPiece]


def write_part(folder: Path, rank: int, part: CheckpointPart) -> None:
    """Write it down."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(part.model, folder / f"{rank}.model.safetensors")
    save_file(part.optimizer, folder / f"{rank}.optimizer.safetensors")
    state = msgspec.structs.replace(part.state, optimizer=part.values)
    (folder / f"{rank}.json").write_bytes(msgspec.json.encode(PartIndex(state, part.pieces)))


def read_parts(folder: Path) -> Snapshot:
    """All that are there, as one."""
    found = sorted(folder.glob("*.json"))
    indices = {path.stem: decode_json(path.read_bytes(), kind=PartIndex) for path in found}
    states = [index.state for index in indices.values()]
    if len({state.updates for state in states}) > 1:
        counts = ", ".join(str(state.updates) for state in states)
        raise RunError(f"the parts in {folder} are from different moments: after {counts} updates.")
    values = {name: value for state in states for name, value in state.optimizer.items()}
    whole = msgspec.structs.replace(states[0], optimizer=values)
    text = msgspec.json.format(msgspec.json.encode(whole))
    return Snapshot(_joined(folder, indices, "model"), _joined(folder, indices, "optimizer"), STATE, text)


def _joined(folder: Path, indices: dict[str, PartIndex], kind: str) -> dict[str, Tensor]:
    """The tensors of all parts; pieces are put together."""
    whole: dict[str, Tensor] = {}
    there: Counter[str] = Counter()
    for rank, index in indices.items():
        for name, tensor in load_file(folder / f"{rank}.{kind}.safetensors").items():
            piece = index.pieces.get(name)
            if piece is None:
                whole[name] = tensor
                continue
            piece.into(whole.setdefault(name, tensor.new_empty(piece.shape)), tensor)
            there[name] += piece.size
            if there[name] == piece.shape[piece.dim]:
                del there[name]
    if there:
        raise RunError(f"a piece of {min(there)!r} is missing in {folder}: a worker did not save its part.")
    return whole


def read_mesh_checkpoint(folder: Path) -> CheckpointPart:
    """A checkpoint of a split model, whole."""
    state, model, optimizer = read_checkpoint(folder, STATE, MeshState)
    return CheckpointPart(model, optimizer, state.optimizer, state)


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


def pieces_remembered(
    pieces: dict[str, TensorPiece], named: Iterable[tuple[str, Tensor]], remembered: dict[str, Tensor]
) -> dict[str, TensorPiece]:
    """Of what `export_optimizer` gave: which tensors are pieces, as their parameters are."""
    found: dict[str, TensorPiece] = {}
    for name, parameter in named:
        for key, tensor in _below(name, remembered) if name in pieces else ():
            piece = pieces[name].like(parameter, tensor)
            if piece is not None:
                found[f"{name}.{key}"] = piece
    return found


def import_optimizer(
    folder: Path,
    part: CheckpointPart,
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, Tensor]],
    pieces: dict[str, TensorPiece] | None = None,
) -> None:
    """Let an optimizer remember what it did; of whole tensors the `pieces` that are this worker's."""
    check_optimizer(folder, part.state.stepped_by, title(optimizer), part.optimizer)
    everything = {**part.optimizer, **part.values}
    for name, parameter in named:
        found = dict(_below(name, everything))
        if found:
            piece = (pieces or {}).get(name)
            optimizer.state[parameter] = {key: _own(value, piece) for key, value in found.items()}


def _own(value: Any, piece: TensorPiece | None) -> Any:
    if not isinstance(value, Tensor):
        return value
    cut = piece is not None and value.ndim > piece.dim and value.shape[piece.dim] == piece.shape[piece.dim]
    return piece.of(value) if piece is not None and cut else value.clone()


def _below(name: str, everything: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    start = f"{name}."
    for key, value in everything.items():
        rest = key.removeprefix(start)
        if key.startswith(start) and "." not in rest:
            yield rest, value
