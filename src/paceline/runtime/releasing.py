"""What a worker is told when it may compute."""

from __future__ import annotations

from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.endings import has_to_tell
from paceline.runtime.run.start import Run
from paceline.store.work.budget import Batch


def ready(run: Run, keeping: CheckpointWriter, rank: int, batch: Batch | None) -> m.Ready:
    """At the beginning."""
    ledger = run.ledger
    return m.Ready(
        run.shared,
        ledger.budget.epoch if ledger.budget else 0,
        ledger.position(),
        batch,
        run.barrier(rank),
        ledger.rounds,
        ledger.found.pop(rank, None),
        has_to_tell(keeping, ledger),
    )


def release(run: Run, keeping: CheckpointWriter, batch: Batch | None) -> m.Release:
    """After a push."""
    ledger, tell = run.ledger, has_to_tell(keeping, run.ledger)
    return m.Release(ledger.pacer.clocks.version, ledger.position(), batch, over=ledger.enough, tell=tell)
