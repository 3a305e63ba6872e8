"""The last thing a run does: hand what it has saved to the workers that wait for it.

A script that calls `pace.leave()` goes on with that model, whatever the protocol: the store's last weights
or the mean of all replicas, and the lead's buffers beside them, bit for bit what `weights.safetensors` holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from paceline.runtime.messages import workers as m
from paceline.runtime.owner.recall import packed_state
from paceline.runtime.run.member import Member
from paceline.runtime.run.peer_start import PeerRun
from paceline.runtime.run.run import Run


def hand_out(run: Run, lead: Member, waiting: Iterable[Member]) -> None:
    """Put the saved model into the memory of all who wait, and wake them."""
    store, layout, clocks = run.store, run.store.layout, run.ledger.pacer.clocks
    remembered = None if isinstance(run, PeerRun) and not run.shared else packed_state(run)
    for member in waiting:
        assert member.segment is not None
        assert lead.segment is not None
        if member.weights is not None:
            member.weights.bytes.copy_(store.weights)
        member.segment.bytes[layout.gradient_end :].copy_(lead.segment.bytes[layout.gradient_end :])
        if remembered is not None:
            with contextlib.suppress(OSError):
                member.channel.send(remembered[0], (remembered[1].fd,))
        _say(member, m.Release(clocks.version, run.ledger.position(), over=True))
    if remembered is not None:
        remembered[1].close_fd()


def turn_away(waiting: Iterable[Member], halted: m.Halt) -> None:
    """There is no such model: the run came to another end."""
    for member in waiting:
        _say(member, halted)


def _say(member: Member, message: m.FromStore) -> None:
    with contextlib.suppress(OSError):
        member.channel.send(message)
    member.channel.close()
