"""Gradients dropped for their staleness, under any protocol: what people are told about it."""

from __future__ import annotations


def told(limit: int | None, name: str, lockstep: bool) -> str:
    """What `--drop-staler` means for a run under this protocol; empty: it was not given."""
    if limit is None:
        return ""
    if lockstep:
        why = f"under {name!r} nobody computes while weights change, so no gradient is stale"
        return f"--drop-staler {limit} changes nothing: {why}"
    return f"gradients that missed more than {limit} updates are dropped; their samples count as seen"
