"""Weights and the state of a run on disk: safetensors and plain JSON, written whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.decoding import decode_json
from paceline.errors import TraceError, Undecodable
from paceline.store.disk.checksums import SINCE, DamagedCheckpoint, newest_sound, verify, write_manifest
from paceline.store.disk.folders import all_saved_in, is_checkpoint, partial_of, previous_of
from paceline.store.disk.reserve import no_room
from paceline.store.disk.tensor_files import save_tensors
from paceline.store.layout import Layout
from paceline.store.parameters import ParameterStore

VERSION = SINCE
T = TypeVar("T")
Tell = Callable[[str], object]
"""Who hears what people should know."""


class SavedRule(msgspec.Struct, frozen=True):
    """A protocol, and what it remembers: of use only to the same protocol, set the same."""

    protocol: str
    settings: dict[str, Any]
    memory: dict[str, Any]


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stood, apart from its tensors."""

    checkpoint: int = 1
    """The version of its form; from 2 on it comes with checksums."""
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
    again: int = 0
    """Of these pushes, those of further optimizers with the same data."""
    withheld: int = 0
    """Steps of scripts whose gradients were pushed with a later one's."""
    rule: SavedRule | None = None
    peers: int | None = None
    """How many peers have files of their own beside this one; None: there are none."""
    one_model: bool = False
    """Whether these have one model and optimizer for all, which are here and not in their files."""
    apply: str = "optimizer"
    """What pushes were; with increments the optimizer's state is that of every worker, by rank."""
    correct: str = "none"
    """How stale gradients were corrected."""
    adjusted: dict[str, float] = {}
    """Factors on the optimizer's settings that the protocol asked for."""
    protocol_sha256: str = ""
    """Of the file of a protocol of one's own."""
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


def save_weights(path: Path, state: dict[str, Tensor], tell: Tell = warnings.warn) -> None:
    """Write model weights; a reader sees the old file or the new one, never half of it. If there is no room,
    older checkpoints than the last give way; `tell` is told."""
    partial = path.with_suffix(".partial")

    def write() -> None:
        try:
            save_tensors(state, partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    make_room_for(write, path.parent, tell)


def make_room_for(write: Callable[[], None], run: Path, tell: Tell) -> None:
    """Write something to a run's folder. If there is no room, the oldest checkpoint gives way, then the next;
    never the newest that is sound, from which the run can go on."""
    while True:
        try:
            return write()
        except (OSError, SafetensorError) as error:
            spare = _spare(run) if no_room(error) else None
            if spare is None:
                raise
        shutil.rmtree(spare, ignore_errors=True)
        if is_checkpoint(spare):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(spare))
        tell(f"no room was left at {run}: the checkpoint {spare.name} was removed to make some")


def _spare(run: Path) -> Path | None:
    """The oldest checkpoint that a run can do without."""
    try:
        needed = newest_sound(run)[0]
    except DamagedCheckpoint:
        needed = None
    return next((each for each in reversed(all_saved_in(run)) if each != needed), None)


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


def write_checkpoint(folder: Path, taken: Snapshot, keep: int = 1, tell: Tell = warnings.warn) -> None:
    """Write it down, whole or not at all; the checkpoint before stays until this one is on the disk, and
    `keep - 1` of those before it for good, unless there is no room for them: `tell` is told."""
    partial = partial_of(folder)
    if not taken.beside:
        shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True, exist_ok=True)
    try:
        make_room_for(lambda: _fill(partial, taken), folder.parent, tell)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # it is of no use, and takes room
        raise
    _change_places(partial, folder, keep)
    _to_disk(folder.parent)


def _fill(partial: Path, taken: Snapshot) -> None:
    save_tensors(taken.model, partial / "model.safetensors")
    save_tensors(taken.optimizer, partial / "optimizer.safetensors")
    (partial / taken.name).write_bytes(taken.state)
    write_manifest(partial)
    for path in (*partial.iterdir(), partial):
        _to_disk(path)


def remove_checkpoint(folder: Path) -> None:
    """Leave nothing of it, nor of those before: the run has finished."""
    for each in (partial_of(folder), folder, *folder.parent.glob(f"{folder.name}.previous*")):
        shutil.rmtree(each, ignore_errors=True)


def _change_places(partial: Path, folder: Path, keep: int) -> None:
    """Renames, since a folder cannot take another's place: between the last two the newest is `previous`."""
    if folder.exists():
        steps = max(1, keep - 1)
        shutil.rmtree(previous_of(folder, steps), ignore_errors=True)
        for step in range(steps, 1, -1):
            if previous_of(folder, step - 1).exists():
                os.replace(previous_of(folder, step - 1), previous_of(folder, step))
        os.replace(folder, previous_of(folder))
    os.replace(partial, folder)
    for each in all_saved_in(folder.parent)[keep:]:
        shutil.rmtree(each, ignore_errors=True)


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
    if state.apply != store.applies:
        raise TraceError(
            f"the checkpoint at {folder} was taken with --apply {state.apply}, whose optimizer state is of "
            f"no use to --apply {store.applies}. Resume it as it was."
        )
    check_optimizer(folder, state.stepped_by, store.stepped_by, optimizer)
    for name, view in store.named_weights():
        view.copy_(model.pop(name))
    store.load(optimizer, state.optimizer)
    return state, model


def other_model(folder: Path) -> TraceError:
    """The checkpoint is fine, the model is not the one it was taken of."""
    return TraceError(
        f"the checkpoint at {folder} belongs to another model. Resume it with the script it came from."
    )


def check_optimizer(folder: Path, was: str, now: str, remembered: dict[str, Tensor]) -> None:
    """What one optimizer remembers is of no use to another; one that remembers nothing may be replaced."""
    if was and was != now and remembered:
        raise TraceError(
            f"the checkpoint at {folder} has the state of {was}, but the script now steps with {now}. "
            f"Resume it with {was}, or begin a new run."
        )


def read_checkpoint(folder: Path, name: str, kind: type[T]) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    """What the files of a checkpoint hold: the state `name`, the model, the optimizer."""
    verify(folder)
    return _read(folder, (name, "model.safetensors", "optimizer.safetensors"), kind)


def read_files(folder: Path, stem: str, kind: type[T]) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    """The same of a worker that keeps its own."""
    verify(folder, f"{stem}.")
    return _read(folder, (f"{stem}.json", f"{stem}.safetensors", f"{stem}.optimizer.safetensors"), kind)


def _read(
    folder: Path, files: tuple[str, str, str], kind: type[T]
) -> tuple[T, dict[str, Tensor], dict[str, Tensor]]:
    for file in files:
        if not (folder / file).is_file():
            raise DamagedCheckpoint(f"no checkpoint to resume at {folder}: {file} is missing.")
    name, model, optimizer = files
    try:
        state = decode_json((folder / name).read_bytes(), kind=kind)
        return state, load_file(folder / model), load_file(folder / optimizer)
    except (OSError, SafetensorError, Undecodable) as error:
        raise DamagedCheckpoint(
            f"the checkpoint at {folder} is damaged: {error}. Resume from another one."
        ) from None


def buffers_of(layout: Layout, segment: Tensor | None) -> dict[str, Tensor]:
    """A copy of a worker's buffers, by name."""
    if segment is None:
        return {}
    views = layout.buffer_views(segment)
    return {slot.name: v.contiguous().clone() for slot, v in zip(layout.buffers, views, strict=True)}
