"""What a worker is told when it may compute."""

from __future__ import annotations

from paceline.runtime.checkpoints.writer import CheckpointWriter
from paceline.runtime.messages import workers as m
from paceline.runtime.owner.endings import has_to_tell
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.store.work.budget import Batch


def ready(run: Run, keeping: CheckpointWriter, member: Member, batch: Batch | None, lead: bool) -> m.Ready:
    """At the beginning; its memory has what it is to compute on."""
    ledger, ahead = run.ledger, run.store.looks_ahead and member.weights is not None
    if ahead and member.weights is not None:
        run.store.awake(run.computing)
        run.store.hand_out(member.weights.bytes)
    return m.Ready(
        run.shared,
        ledger.budget.epoch if ledger.budget else 0,
        ledger.position(),
        batch,
        run.agrees,
        run.barrier(member.rank),
        ahead,
        ledger.rounds,
        ledger.found.pop(member.rank, None),
        has_to_tell(keeping, ledger),
        lead,
    )


def release(
    run: Run, keeping: CheckpointWriter, member: Member, batch: Batch | None, lead: bool
) -> m.Release:
    """After a push."""
    ledger, tell = run.ledger, has_to_tell(keeping, run.ledger)
    skipped, member.overflowed = member.overflowed, False
    version, position = ledger.pacer.clocks.version, ledger.position()
    over = ledger.enough
    return m.Release(version, position, batch, over=over, skipped=skipped, tell=tell, lead=lead)
