"""Which protocols can take checkpoints during a run."""

from __future__ import annotations

from paceline.errors import ConfigError
from paceline.protocols.core.peer import Peer


def check_steady(every: str | None, name: str, protocol: object) -> None:
    """Refuse checkpoints during a run for peers that are never all at rest."""
    if every is None or not isinstance(protocol, Peer) or (protocol.resumable and not protocol.sends_ahead):
        return
    why = "has vectors under way" if protocol.resumable else "lets workers make unequal numbers of iterations"
    raise ConfigError(
        f"--checkpoint-every {every} saves all peers at rest after the same iteration, but protocol {name!r} "
        f"as it is set {why}. Leave --checkpoint-every out, or use another protocol."
    )
