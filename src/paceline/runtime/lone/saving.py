"""What remains of a lone worker's run on disk."""

from __future__ import annotations

from typing import Any

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from paceline.config import RunConfig
from paceline.runtime.checkpoints.random_state import RandomState
from paceline.store.disk.checkpoint import Snapshot, Tell, remove_checkpoint, save_weights, write_checkpoint
from paceline.store.disk.reserve import Reserve, not_saved


class LoneState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a lone run stood, in its own terms: passes over the loader, and batches in the last."""

    checkpoint: int = 1
    passes: int
    batches: int
    steps: int
    version: int
    samples: int
    optimizer: dict[str, Any]
    began: RandomState | None
    """When the last pass began, so that a shuffled loader gives the same order again."""
    stopped: RandomState
    schedules: tuple[int, ...] | None = None
    """How often each prepared scheduler was stepped; None in checkpoints that do not tell."""
    origins: tuple[int, ...] = ()
    """The run's steps when each was prepared."""


def save_lone(
    config: RunConfig, reserve: Reserve, weights: dict[str, Tensor], taken: Snapshot | None, tell: Tell
) -> str:
    """The weights; and a checkpoint, if the run is to go on from there. What could not be written is
    returned, and `tell` hears what had to give way."""
    folder = config.path / "checkpoint"
    reserve.release()
    try:
        if taken is not None:
            write_checkpoint(folder, taken, config.keep, tell)
        save_weights(config.path / "weights.safetensors", weights, tell)
    except (OSError, SafetensorError) as error:
        return not_saved("what it trained", error, config.path)
    if taken is None:
        remove_checkpoint(folder)
    return ""
