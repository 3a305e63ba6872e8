"""The names of corrections for stale gradients: what `--correct` and `join(correct=...)` take.

A name is `auto`, `none`, or one to two parts joined by a plus sign: `dana` (a momentum per worker), and a
rule for the gradient itself (`gap`, `dc`, `dca`). The strength of `dc` and `dca` may follow a colon. The
arithmetic is in `store/corrections/`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.errors import ConfigError

AUTO, NONE, DANA = "auto", "none", "dana"
STRENGTHS: dict[str, float | None] = {"gap": None, "dc": 0.04, "dca": 2.0}
"""Rules for the gradient, with the default strength of each; None: it has no strength."""
EXAMPLES = "Use auto, none, dana, gap, dc, dca, dana+gap, or dc:0.1 for another strength"


class Named(NamedTuple):
    """The corrections that a name means."""

    dana: bool = False
    rule: str | None = None
    strength: float | None = None


def parse_correction(text: str) -> Named:
    """Parse a name. `dana+gap` is two corrections at once; `auto` and `none` mean no correction until a run
    chooses one."""
    if text in (AUTO, NONE):
        return Named()
    named = Named()
    for part in text.split("+"):
        named = _with(named, part.strip(), text)
    return named


def _with(named: Named, part: str, text: str) -> Named:
    name, colon, strength = part.partition(":")
    if part == DANA and not named.dana:
        return named._replace(dana=True)
    if name not in STRENGTHS or named.rule is not None:
        raise ConfigError(f"unknown correction of stale gradients {text!r}. {EXAMPLES}.")
    if colon and STRENGTHS[name] is None:
        raise ConfigError(f"correction {name} has no strength, got {text!r}. {EXAMPLES}.")
    return named._replace(rule=name, strength=_strength(strength, text) if colon else STRENGTHS[name])


def _strength(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"the strength of a correction must be a number >= 0, got {text!r}. {EXAMPLES}.")
    return value
