"""What remains of a run on disk."""

from __future__ import annotations

from typing import Literal

from paceline.config import RunConfig
from paceline.runtime.gathering import Assembly, run_state
from paceline.runtime.member import Member
from paceline.runtime.messages import Halt
from paceline.store.checkpoint import model_state, save_checkpoint, save_weights
from paceline.trace.events import RunEnded


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


def run_ended(now: float, halted: Halt | None) -> RunEnded:
    """The last event: how the run ended, and why."""
    if halted is None:
        return RunEnded(now, "finished")
    status: Literal["stopped", "failed"] = "stopped" if halted.kind == "stopped" else "failed"
    return RunEnded(now, status, halted.text, halted.kind == "config")
