"""`train --advice FILE`: what the file says, unless the command line says otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError


def advised(file: Path | None, asked: dict[str, Any], typed: set[str]) -> dict[str, Any]:
    """Fields of the configuration by a file of `advise staleness --apply`; `asked` has what was `typed`."""
    if file is None:
        return {}
    from paceline.plan.staleness.follow import read_advice

    dials = read_advice(file).dials
    if "workers" in typed and asked["workers"] != dials["workers"]:
        raise ConfigError(
            f"the advice {file} is for {dials['workers']} workers, got --workers {asked['workers']}. Leave "
            "--workers out, or ask for advice for as many."
        )
    if dials["settings"] and "protocol" in typed and asked["protocol"] != dials["protocol"]:
        raise ConfigError(
            f"the advice {file} is carried out by {dials['protocol']}, got --protocol {asked['protocol']}. "
            "Leave --protocol out."
        )
    dials["settings"] |= asked["settings"]
    return {name: value for name, value in dials.items() if name == "settings" or name not in typed}
