"""What a check finds: a state, what was seen, and a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

State = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    check: str
    state: State
    seen: str
    advice: str = ""
    """What to do, or what it means. Never empty when the state is not ok."""


def worst(findings: Iterable[Finding]) -> State:
    """One problem makes all a problem."""
    states = {finding.state for finding in findings}
    return "problem" if "problem" in states else "warning" if "warning" in states else "ok"
