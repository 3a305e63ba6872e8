"""What a run takes over from a checkpoint, and which checkpoints it refuses."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from paceline.errors import ConfigError
from paceline.protocols.core.base import restore
from paceline.runtime.checkpoints.worker_state import restored
from paceline.runtime.run.run import saved_rule
from paceline.store.disk.checkpoint import RunState, SavedRule, load_checkpoint
from paceline.store.ledger import Ledger
from paceline.store.parameters import ParameterStore

CHECKPOINT_HAD = "the checkpoint was made with another"


def momentum_lost(was: str, now: str) -> str:
    """What of a checkpoint another correction cannot go on from, in words."""
    if was == now:
        return ""
    return f"the checkpoint was taken with correct {was}, and goes on with {now}: their memory begins anew"


def resume(folder: str | None, store: ParameterStore, ledger: Ledger) -> tuple[dict[str, Tensor], str]:
    """The buffers, and how stale gradients were corrected."""
    if folder is None:
        return {}, store.corrected_by
    state, buffers = load_checkpoint(Path(folder), store)
    if state.peers is not None:
        raise ConfigError(
            f"the checkpoint at {folder} is of {state.peers} peers under {_named(state)}, which keep "
            "models of their own. Resume it with the same protocol and number of workers."
        )
    ledger.resume_at(state.version, state.samples, state.units, state.pushes, state.batches)
    ledger.again, ledger.withheld = state.again, state.withheld
    protocol = ledger.pacer.protocol
    if state.rule is not None and _same(state.rule, saved_rule(protocol)):
        if not ledger.warn_if_changed(state.protocol_sha256, f"{CHECKPOINT_HAD}, whose memory is left out"):
            restore(protocol, state.rule.memory)
        store.adjusted = dict(state.adjusted)
    if ledger.budget is not None and state.budget is not None:
        ledger.budget.load(state.budget)
    ledger.found = restored(state.workers)
    return buffers, state.correct


def resume_peers(
    folder: str | None, store: ParameterStore, ledger: Ledger, workers: int, shared: bool
) -> None:
    """What of a checkpoint is not the workers' own; refuses one that they would not find theirs in."""
    if folder is None:
        return
    state, _ = load_checkpoint(Path(folder), store)
    rule, asked = state.rule, (workers, *ledger.named)
    if rule is None or (state.peers, rule.protocol, rule.settings) != asked:
        whose = "a paced run" if state.peers is None else f"{state.peers} peers under {_named(state)}"
        raise ConfigError(
            f"the checkpoint at {folder} is of {whose}, and peers go on from replicas, optimizers and "
            "memories of their own. Resume it with the same protocol, settings and number of workers."
        )
    ledger.warn_if_changed(state.protocol_sha256, CHECKPOINT_HAD)
    if state.one_model != shared:
        kept, now = (
            ("one model for all", "one each") if state.one_model else ("one model each", "one for all")
        )
        raise ConfigError(
            f"the checkpoint at {folder} is of workers with {kept}; as the run is set now they have {now}. "
            "Resume it with the --fabric and --private-weights it had, and the same script."
        )
    ledger.resume_at(state.version, state.samples, state.units, state.pushes, state.batches)
    if ledger.budget is not None and state.budget is not None:
        ledger.budget.load(state.budget)


def _named(state: RunState) -> str:
    return "?" if state.rule is None else f"{state.rule.protocol!r}"


def _same(one: SavedRule, other: SavedRule) -> bool:
    return (one.protocol, one.settings) == (other.protocol, other.settings)
