"""Increments instead of gradients (`--apply increments`): which protocols support them.

An increment is applied in full on arrival. So every rule works that only decides when workers continue.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import ConfigError
from paceline.protocols.core.base import Fate
from paceline.protocols.core.pacer import Decision

ADDING = ("asp", "bounded_ps", "dssp", "psp", "ssp")
"""Protocols that apply every push on arrival, unless their settings say otherwise."""
FITTING = f"Use one that applies every push at once ({', '.join(ADDING)}), or --apply optimizer."


def check_dials(dials: Mapping[str, Any]) -> None:
    """Refuse settings of a run that do not work with increments."""
    full = "every increment counts in full"
    for asked, flag, why in (
        (dials["mesh"] is not None, "--mesh", "a model that is split has no store that adds"),
        (dials["store_hosts"] > 1, "--store-hosts", "only a store on one host adds so far"),
        (dials["weighting"] not in ("mean", "sum", 1.0), f"--weighting {dials['weighting']}", full),
        (dials["damping"] != "none", f"--damping {dials['damping']}", full),
        (dials["balance"], "--balance", f"{full}, whatever its samples"),
        (
            dials["drop_staler"] is not None,
            "--drop-staler",
            "what is dropped would stay in its worker's momentum",
        ),
        (dials["lr_cap"] is not None, "--lr-cap", "rates are the workers' own"),
        (dials["park_slow"] is not None, "--park-slow", "the store does not know the workers' own rates"),
        (dials["trigger"] is not None, "--trigger", "a worker's own optimizer has stepped already"),
    ):
        if asked:
            raise ConfigError(f"{flag} does not go with --apply increments: {why}. Leave one of them out.")


def check_rule(name: str, lockstep: bool, own: bool, trigger: float | None = None) -> None:
    """Refuse protocols that make one step from several pushes. A user's own protocol is checked by its
    verdicts."""
    if trigger is not None:
        raise ConfigError(
            f"trigger {trigger:g} keeps gradients back, but with --apply increments a worker's own optimizer "
            "has stepped with them already. Leave one of them out."
        )
    if lockstep or not (own or name in ADDING):
        raise ConfigError(
            f"protocol {name!r} makes one step of several gradients, but with --apply increments every "
            f"worker steps by itself. {FITTING}"
        )


def no_store(name: str) -> ConfigError:
    """Peers have no store that could add increments."""
    return ConfigError(
        f"--apply increments is for a store, and under {name!r} there is none: workers step by themselves. "
        "Leave it out."
    )


def check_decision(name: str, decision: Decision) -> None:
    """Refuse a verdict that needs gradients or the store's optimizer."""
    for asked, what in (
        (decision.fate is Fate.HOLD or decision.flush is not None, "adds pushes up before they are applied"),
        (decision.lr_scale != 1.0, "changes how much a push counts"),
        (bool(decision.adjust), "changes settings of the store's optimizer"),
    ):
        if asked:
            raise ConfigError(
                f"protocol {name!r} {what}, but with --apply increments every push is added at once and in "
                f"full, and optimizers are the workers' own. {FITTING}"
            )


def told(weighting: object, far: bool) -> list[str]:
    """The message at the start of such a run."""
    means = ": weighting mean does not apply" if weighting == "mean" else ""
    said = [
        "apply increments: every worker steps with its own optimizer, and the store adds what that changes, "
        f"each in full{means}"
    ]
    if far:
        said.append(
            "a checkpoint of this run has no optimizer state, which is the workers' own on several hosts: "
            "resumed, they begin with an empty one"
        )
    return said


def told_empty(ranks: list[int], resumed: bool) -> list[str]:
    """A message that names the workers whose optimizer state a checkpoint does not have."""
    if not (resumed and ranks):
        return []
    named = ", ".join(map(str, ranks))
    return [f"the checkpoint has no optimizer state of rank {named}: momentum and the like begin anew there"]
