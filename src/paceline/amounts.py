"""Amounts as flags write them: 10m, 500, 5m:drop, 50MB, 0.25:0.5."""

from __future__ import annotations

import math
from typing import NamedTuple

from paceline.errors import ConfigError

STUCK_ACTIONS = ("warn", "drop", "stop")


class Every(NamedTuple):
    """How often checkpoints are taken: after so many updates, or seconds."""

    updates: int | None = None
    seconds: float | None = None


def parse_every(text: str) -> Every:
    """`500`: updates; `60s`, `10m`, `1h`: time."""
    number, unit = text[:-1], {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        every = Every(updates=int(text)) if unit is None else Every(seconds=float(number) * unit)
    except ValueError:
        every = Every(updates=0)
    if not 0 < (every.updates or every.seconds or 0) < math.inf:
        raise ConfigError(
            "--checkpoint-every takes a number of updates such as 500, or a time such as 60s, 10m or 1h, "
            f"got {text!r}."
        )
    return every


def parse_stuck(text: str) -> tuple[float, str]:
    """`5m:drop`: seconds, and what is done then; `5m` alone only warns."""
    time, _, action = text.partition(":")
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(time[-1:], 0.0)
    try:
        seconds = float(time[:-1]) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf or action not in ("", *STUCK_ACTIONS):
        raise ConfigError(
            "--stuck-after takes a time and what to do then, such as 90s:warn, 5m:drop or 1h:stop, got "
            f"{text!r}."
        )
    return seconds, action or "warn"


def parse_size(text: str) -> int | None:
    """`50MB`: bytes, in KB, MB or GB; `none`: without a limit."""
    if text == "none":
        return None
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = (text[:-2], units.get(text[-2:].upper())) if text != "0" else ("0", 1)
    if unit is None or not number.isdecimal():
        raise ConfigError(f"--trace-limit takes a size such as 50MB or 2GB, 0, or none, got {text!r}.")
    return int(number) * unit


def parse_injection(text: str) -> tuple[float, float]:
    """`0.25:0.5`: a quarter of the workers share half of their batches."""
    donors, _, share = text.partition(":")
    try:
        shares = float(donors), float(share)
    except ValueError:
        shares = (0.0, 0.0)
    if not all(0 < each <= 1 for each in shares):
        raise ConfigError(
            "inject is DONORS:SHARE, two shares in (0, 1] such as 0.25:0.25 (of the workers, of their "
            f"batches), got {text!r}."
        )
    return shares
