"""`pace.save` and `pace.load`: model, optimizer, schedulers and position in one folder.

Tensors go to safetensors and everything else to plain JSON, in which what JSON cannot tell apart is marked.
Nothing is pickled, and nothing is unpickled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import ConfigError
from paceline.store.disk.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from paceline.store.layout import plain_name
from paceline.store.optimizers import GroupSettings, apply_settings

NAME = "pace.json"
State = tuple[dict[str, Tensor], dict[str, Any]]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """All that is no tensor."""

    position: int
    """Iterations of the run, as a prepared scheduler counts them."""
    optimizer: dict[str, Any]
    settings: list[GroupSettings]
    schedulers: list[Any]
    values: dict[str, Any]
    """What the script wanted to be kept."""


class Loaded:
    """A folder that was read, waiting for the objects it belongs to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.saved, self._model, self._optimizer = read_checkpoint(folder, NAME, Saved)

    def into(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, schedulers: Sequence[LRScheduler]
    ) -> None:
        """Put everything into a script's own objects, before they are prepared."""
        saved, own = self.saved, {plain_name(name): t for name, t in model.state_dict(keep_vars=True).items()}
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in self._model.items()}:
            raise ConfigError(
                f"the model saved in {self._folder} by pace.save() is another one than the script prepares."
            )
        counts = len(saved.settings), len(optimizer.param_groups), len(saved.schedulers), len(schedulers)
        if counts[0] != counts[1] or counts[2] != counts[3]:
            raise ConfigError(
                f"what pace.save wrote to {self._folder} has {counts[0]} parameter groups and {counts[2]} "
                f"schedulers; the script prepares {counts[1]} and {counts[3]}. Prepare the same."
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self._model[name])
        _remember(optimizer, (self._optimizer, saved.optimizer))
        apply_settings(optimizer, saved.settings)
        for scheduler, state in zip(schedulers, saved.schedulers, strict=True):
            scheduler.load_state_dict(unmarked(state))


def write(folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], saved: Saved) -> None:
    """All of it, or nothing."""
    text = msgspec.json.format(msgspec.json.encode(saved))
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(folder, Snapshot(model, optimizer, NAME, text))


def _remember(optimizer: torch.optim.Optimizer, state: State) -> None:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for name, value in [*state[0].items(), *state[1].items()]:
        number, key = name.split(".", 1)
        optimizer.state[trained[int(number)]][key] = value


def marked(value: Any, where: str) -> Any:
    """Plain values as JSON can keep them."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.numel() == 1:
            return value.item()
        case Counter() | dict():
            kind = "counter" if isinstance(value, Counter) else "dict"
            return {kind: [[k, marked(v, where)] for k, v in value.items()]}
        case list() | tuple():
            return {type(value).__name__: [marked(each, where) for each in value]}
    raise ConfigError(f"{where} has a {type(value).__name__}, which pace.save cannot write as plain JSON.")


def unmarked(value: Any) -> Any:
    """What they were."""
    if not isinstance(value, dict):
        return value
    (kind, inner), *_ = value.items()
    if kind in ("counter", "dict"):
        named = {k: unmarked(v) for k, v in inner}
        return Counter(named) if kind == "counter" else named
    items = [unmarked(each) for each in inner]
    return tuple(items) if kind == "tuple" else items
