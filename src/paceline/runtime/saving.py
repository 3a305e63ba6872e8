"""What remains of a run on disk."""

from __future__ import annotations

from paceline.config import RunConfig
from paceline.runtime.gathering import Assembly, run_state
from paceline.runtime.member import Member
from paceline.store.checkpoint import model_state, save_checkpoint, save_weights


def save_run(config: RunConfig, run: Assembly, lead: Member, *, checkpoint: bool, peers: int | None) -> None:
    """The weights, with the lead's buffers; and what it takes to go on, if the run did not finish.

    `peers`: how many workers have saved their own part of that.
    """
    memory = lead.segment.bytes if lead.segment else None
    if checkpoint:
        state = run_state(run.ledger, run.store, peers, run.shared)
        save_checkpoint(config.path / "checkpoint", run.store, memory, state)
    weights = model_state(run.store.layout, run.store.views, memory)
    save_weights(config.path / "weights.safetensors", weights)
