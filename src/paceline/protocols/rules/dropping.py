"""Gradients dropped for their staleness, under any protocol: the message at the start of a run."""

from __future__ import annotations


def told(limit: int | None, name: str, lockstep: bool) -> str:
    """What `--drop-staler` means under this protocol, as a message. Empty if the flag was not given."""
    if limit is None:
        return ""
    if lockstep:
        why = f"under {name!r} no worker computes while weights change, so no gradient is stale"
        return f"--drop-staler {limit} changes nothing: {why}"
    return f"gradients that missed more than {limit} updates are dropped; their samples count as seen"
