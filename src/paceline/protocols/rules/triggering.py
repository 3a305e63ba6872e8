"""Event-triggered pushes (`--trigger`): where they make sense, and what people are told about them.

What the rule is stands where it is carried out, in `runtime/worker/optimizer/trigger.py`.
"""

from __future__ import annotations

from paceline.errors import ConfigError

MOST = 8
"""Gradients that are added up at most, unless somebody says otherwise."""


def heard(so_far: float | None, named: float | None, ordered: bool) -> float | None:
    """The share, now that a script has named one or none; the command's word wins."""
    if ordered or named is None:
        return so_far
    if so_far not in (None, named):
        raise ConfigError(f"workers name different triggers, {so_far:g} and {named:g}. Name one.")
    return named


def check(share: float | None, name: str, *, paced: bool, lockstep: bool = False) -> None:
    """Refuse a share where nobody could keep a gradient back."""
    if share is None or (paced and not lockstep):
        return
    why = "all wait for every gradient" if paced else "workers meet, and nobody pushes to a store"
    raise ConfigError(
        f"--trigger {share:g} keeps gradients back, but under {name!r} {why}. Use asp, ssp or dssp, say, or "
        "leave --trigger out."
    )


def told(share: float | None, most: int) -> list[str]:
    """What people are told when a run begins."""
    if share is None:
        return [] if most == MOST else [f"--trigger-most {most} changes nothing without --trigger"]
    return [
        f"a worker pushes when its gradient has {share:g} times the usual norm of a single one, or after "
        f"{most}; what it keeps is added to the next (--trigger)"
    ]
