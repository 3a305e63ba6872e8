"""One colour per protocol and per state, the same in every view.

The hues keep apart under the common colour-vision deficiencies, and no view relies on hue alone:
lines carry labels and dashes, states carry words.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

SLOTS: dict[str, tuple[str, str]] = {
    "blue": ("#2563c9", "#7aaeff"),
    "green": ("#0b8a68", "#3fcf9f"),
    "orange": ("#cf4f12", "#ff9a62"),
    "violet": ("#9a3bb0", "#d794ea"),
    "cyan": ("#087e96", "#4fc9df"),
    "rose": ("#c22a63", "#ff86ac"),
    "olive": ("#6f7a10", "#c0c95a"),
    "brown": ("#8a5a2b", "#d5a878"),
    "grey": ("#5b6472", "#a7b0bd"),
}
"""Name -> colour on light and on dark paper."""

STATES: dict[str, tuple[str, str]] = {
    "compute": ("#7d8da3", "#7487a1"),
    "wait": ("#f0b13c", "#e5a83b"),
    "exchange": ("#5a48b8", "#a99bff"),
}
"""Working time is quiet, lost time stands out."""

_FIXED = {"bsp": "blue", "ssp": "green", "dssp": "orange", "asp": "violet"}
_TERMINAL = {"blue": "blue", "green": "green", "orange": "yellow", "violet": "magenta", "cyan": "cyan"}


def slots(protocols: Iterable[str]) -> dict[str, str]:
    """A slot for each protocol: always the same for the common ones, distinct while slots last."""
    chosen: dict[str, str] = {}
    for name in protocols:
        if name not in chosen:
            chosen[name] = _FIXED.get(name) or _free_slot(name, set(chosen.values()))
    return chosen


def slots_in_turn(protocol: str) -> list[str]:
    """All slots, the protocol's own first: for many runs of one protocol, where its colour tells nothing."""
    own = slots([protocol])[protocol]
    return [own, *(slot for slot in SLOTS if slot != own)]


def terminal_colour(protocol: str) -> str:
    """The nearest of the terminal's own colours, which suit its background."""
    return _TERMINAL.get(_FIXED.get(protocol, ""), "cyan")


def css() -> str:
    """The palette as custom properties, for light and dark paper."""
    named = {**SLOTS, **STATES}
    light, dark = ("".join(f"--{name}:{pair[side]};" for name, pair in named.items()) for side in (0, 1))
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _free_slot(name: str, taken: set[str]) -> str:
    names = [slot for slot in SLOTS if slot not in _FIXED.values()]
    first = crc32(name.encode()) % len(names)
    in_turn = names[first:] + names[:first] + [slot for slot in SLOTS if slot not in names]
    return next((slot for slot in in_turn if slot not in taken), in_turn[0])
