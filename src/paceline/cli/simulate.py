"""`paceline simulate`: the same protocols in virtual time."""

from __future__ import annotations


def simulate() -> None:
    """Simulate."""
