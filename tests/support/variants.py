"""Every registered protocol in every named mode, so that a new one is tested by being registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from paceline.protocols import PACED

TIGHT: dict[str, dict[str, Any]] = {
    "ssp": {"staleness": 1},
    "dssp": {"lower": 1, "upper": 3},
    "backup_bsp": {"backups": 2},
    "bounded_ps": {"staleness": 1, "resync": 2},
    "elastic_bsp": {"lookahead": 3, "max_superstep": 5},
    "hybrid_sgd": {"h": 5, "end": 40, "points": "5:2,10:3,15:4"},
    "sync_switch": {
        "phases": "bsp@0.5,ssp(staleness=1)@0.8,asp",
        "total": 30,
        "window": 1,
        "consecutive": 1,
    },
}
"""Settings under which short schedules run into the bounds."""


def variants() -> list[tuple[str, dict[str, Any]]]:
    """(name, settings): the defaults, and each choice of a `Literal` setting, made tight if we can."""
    return [(name, settings) for name in sorted(PACED) for settings in _settings(name)]


def label(variant: tuple[str, dict[str, Any]]) -> str:
    """How a variant is called in the list of tests."""
    name, settings = variant
    return "-".join([name, *map(str, settings.values())])


def _settings(name: str) -> Iterator[dict[str, Any]]:
    tight = TIGHT.get(name, {})
    yield {}
    if tight:
        yield tight
    hints = get_type_hints(PACED[name])
    for f in fields(PACED[name]):  # type: ignore[arg-type]
        if f.init and get_origin(hints[f.name]) is Literal:
            yield from (
                {**tight, f.name: choice} for choice in get_args(hints[f.name]) if choice != f.default
            )
