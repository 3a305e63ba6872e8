"""What remains of a lone worker's run on disk."""

from __future__ import annotations

from safetensors import SafetensorError
from torch import Tensor

from paceline.config import RunConfig
from paceline.store.disk.checkpoint import Snapshot, remove_checkpoint, save_weights, write_checkpoint
from paceline.store.disk.reserve import Reserve, not_saved


def save_lone(config: RunConfig, reserve: Reserve, weights: dict[str, Tensor], taken: Snapshot | None) -> str:
    """The weights; and a checkpoint, if the run is to go on from there. What could not be written is told."""
    folder = config.path / "checkpoint"
    reserve.release()
    try:
        if taken is not None:
            write_checkpoint(folder, taken, config.keep)
        save_weights(config.path / "weights.safetensors", weights)
    except (OSError, SafetensorError) as error:
        return not_saved("what it trained", error, config.path)
    if taken is None:
        remove_checkpoint(folder)
    return ""
