"""Sizes and times as people write them: 8GiB, 500MB, 3.2 ms."""

from __future__ import annotations

import math
import re

from paceline.errors import ConfigError

MIB = 1024**2
GIB = 1024**3
_SIZES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZES |= {
    "k": 1024,
    "m": MIB,
    "g": GIB,
    "t": 1024 * GIB,
    "kib": 1024,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
}


def parse_size(value: str | int | float, what: str = "size") -> int:
    """Bytes of `8GiB`, `500 MB`, or of a plain number."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([A-Za-z]*)\s*", str(value))
    try:
        number = float(found[1]) * _SIZES[found[2].lower()] if found else math.nan
    except (ValueError, KeyError):
        number = math.nan
    if not 0 < number < 2**63:
        raise ConfigError(f"{what} must be a size such as 8GiB or 500MB, got {str(value)!r}.")
    return int(number)


def size_text(size_bytes: float) -> str:
    """Bytes for people."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
