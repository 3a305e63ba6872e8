"""The last thing a run does: hand what it has saved to the workers that wait for it.

A script that calls `pace.leave()` goes on with that model, whatever the protocol: the store's last weights
or the mean of all replicas, and the lead's buffers beside them, bit for bit what `weights.safetensors` holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.start import Run


def hand_out(run: Run, lead: Member, waiting: Iterable[Member]) -> None:
    """Put the saved model into the memory of all who wait, and wake them."""
    store, layout, clocks = run.store, run.store.layout, run.ledger.pacer.clocks
    for member in waiting:
        assert member.segment is not None
        assert lead.segment is not None
        if member.weights is not None:
            member.weights.bytes.copy_(store.weights)
        member.segment.bytes[layout.gradient_end :].copy_(lead.segment.bytes[layout.gradient_end :])
        _say(member, m.Release(clocks.version, run.ledger.position(), over=True))


def turn_away(waiting: Iterable[Member], halted: m.Halt) -> None:
    """There is no such model: the run came to another end."""
    for member in waiting:
        _say(member, halted)


def _say(member: Member, message: m.FromStore) -> None:
    with contextlib.suppress(OSError):
        member.channel.send(message)
    member.channel.close()


def notice_saving(models: Iterable[nn.Module], tell: Callable[[], None]) -> None:
    """Be told when somebody takes the state of one of these models.

    By the class and not by a hook: a hook would be saved, copied and pickled along with the model.
    """
    plain, known = nn.Module.state_dict, {id(model) for model in models}

    @wraps(plain)
    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(self) in known:
            tell()
        return plain(self, *args, **kwargs)

    nn.Module.state_dict = state_dict  # type: ignore[method-assign]
