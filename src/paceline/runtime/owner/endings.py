"""What remains of a run on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from safetensors import SafetensorError

from paceline.config import RunConfig
from paceline.runtime.checkpoints.worker_state import all_told
from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.messages.workers import Halt
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.store.disk.checkpoint import (
    Tell,
    model_state,
    remove_checkpoint,
    save_weights,
    write_checkpoint,
)
from paceline.store.disk.reserve import Reserve, not_saved
from paceline.store.increments import AddingStore
from paceline.store.ledger import Ledger
from paceline.store.parameters import ParameterStore
from paceline.trace.events import RunEnded

NEVER_PREPARED = "the script ended without pace.prepare(model, optimizer, loader), so nothing was trained."


def save_run(
    config: RunConfig,
    run: Run,
    lead: Member,
    peers: int | None,
    room: Reserve,
    whole: bool,
    kept: bool,
    halted: Halt | None,
    tell: Tell,
) -> Halt | None:
    """The weights, with the lead's buffers; and what it takes to go on, unless all went well. How the run
    ended: as told, unless something could not be written.

    `peers`: how many workers have saved their own part of that; `whole`: whether nobody's is missing; `tell`
    hears what had to give way.
    """
    folder, undone = config.path / "checkpoint", []
    memory = lead.segment.bytes if lead.segment else None
    room.release()

    def checkpoint() -> None:
        write_checkpoint(folder, run.snapshot(lead, peers), config.keep, tell)

    def weights() -> None:
        state = model_state(run.store.layout, run.store.views, memory)
        save_weights(config.path / "weights.safetensors", state, tell)

    steps = [("the checkpoint", checkpoint)] if whole and kept else []
    for what, save in [*steps, ("the weights", weights)]:
        try:
            save()
        except (OSError, SafetensorError) as error:
            undone.append(not_saved(what, error, config.path))
    if undone:
        why = "trained to the end" if halted is None else halted.text.rstrip(".")
        return Halt("failed", ". ".join([why, *undone]))
    if not kept:
        remove_checkpoint(folder)
    return halted


def keep_if_due(keeping: CheckpointWriter, run: Run, members: Iterable[Member]) -> None:
    """A checkpoint while the run goes on: after an update, before anybody is released.

    With no gradient held, so that every sample counted is in the weights; and with the buffers of the
    first worker that sleeps, since those of others may be changing.
    """
    ledger, clocks = run.ledger, run.ledger.pacer.clocks
    if clocks.held or not keeping.due(clocks.version):
        return
    members = list(members)
    if ledger.pacer.protocol.lockstep and not all_told(ledger.told, clocks.active):
        return  # after the next round: all are asked to tell where they stand
    if _hands_in(ledger) and not _all_handed_in(run.store, members):
        return  # after the next push of each
    there = (each for each in members if each.asks and not each.gone and each.segment is not None)
    lead = min(there, key=lambda each: each.rank, default=None)
    if lead is not None:
        keeping.keep(clocks.version, run.ledger.samples, lambda: run.take(lead))
        ledger.told = {}


def has_to_tell(keeping: CheckpointWriter, ledger: Ledger) -> bool:
    """Whether workers are to tell where they stand with their next push, for a checkpoint: in lockstep, and
    where each has an optimizer of its own."""
    tells = ledger.pacer.protocol.lockstep or _hands_in(ledger)
    return tells and keeping.due(ledger.pacer.clocks.version + 1)


def _hands_in(ledger: Ledger) -> bool:
    """Whether workers hand in what their own optimizers remember."""
    return ledger.config.apply == "increments" and ledger.config.listen is None


def _all_handed_in(store: ParameterStore, members: Iterable[Member]) -> bool:
    """Also who evaluates has to: its optimizer is as good as others'."""
    ranks = [each.rank for each in members if each.segment is not None and not each.gone]
    return isinstance(store, AddingStore) and all_told(store.told, ranks)


def last_remarks(ledger: Ledger, finished: bool) -> Iterator[str]:
    """What people should be warned of when the run is over."""
    lost = ledger.abandoned()
    if lost and finished:
        yield f"{lost} samples were not processed: their workers died when no other worker was left"
    unmet = ledger.unmet() if finished else ""
    if unmet:
        yield unmet
    undone = ledger.undone() if finished else ""
    if undone:
        yield undone
    if ledger.skipped:
        yield f"{ledger.skipped} gradients were not finite and were skipped"


def run_ended(now: float, halted: Halt | None, samples_due: int | None) -> RunEnded:
    """The last event: how the run ended, and why."""
    if halted is None:
        return RunEnded(now, "finished", samples_due=samples_due)
    status: Literal["stopped", "failed"] = "stopped" if halted.kind == "stopped" else "failed"
    return RunEnded(now, status, halted.text, halted.kind == "config", samples_due)
