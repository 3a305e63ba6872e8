"""Tells an exchange that broke off from an error of a worker's own.

Workers of a mesh ask for themselves, `plans/processes` for the ranks of a plan.
"""

from __future__ import annotations


def is_torn(text: str) -> bool:
    """Whether gloo says that another worker is gone."""
    words = ("gloo", "connection closed", "connection reset", "broken pipe")
    return any(word in text.lower() for word in words)
