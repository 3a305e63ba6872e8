"""Event-triggered pushes (`--trigger`): where they work, and the messages about them.

The rule itself is in `runtime/worker/optimizer/trigger.py`.
"""

from __future__ import annotations

from paceline.errors import ConfigError

MOST = 8
"""Default for the most gradients that are added up."""


def heard(so_far: float | None, named: float | None, ordered: bool) -> float | None:
    """The share to use after a script has named one or none. The command's flag wins."""
    if ordered or named is None:
        return so_far
    if so_far not in (None, named):
        raise ConfigError(f"workers name different triggers, {so_far:g} and {named:g}. Name one.")
    return named


def check(share: float | None, name: str, *, paced: bool, lockstep: bool = False) -> None:
    """Refuse a share under protocols whose workers cannot keep a gradient back."""
    if share is None or (paced and not lockstep):
        return
    why = (
        "all wait for every gradient" if paced else "workers average among themselves, and there is no store"
    )
    raise ConfigError(
        f"--trigger {share:g} keeps gradients back, but under {name!r} {why}. Use asp, ssp or dssp, say, or "
        "leave --trigger out."
    )


def told(share: float | None, most: int) -> list[str]:
    """The message at the start of a run."""
    if share is None:
        return [] if most == MOST else [f"--trigger-most {most} changes nothing without --trigger"]
    return [
        f"a worker pushes when the norm of its gradient is {share:g} times that of a usual one, or after "
        f"{most} gradients; a gradient it keeps is added to the next (--trigger)"
    ]
