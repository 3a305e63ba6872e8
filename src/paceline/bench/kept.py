"""Results kept line by line as JSON, so that a long benchmark can be interrupted and go on later."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

import msgspec

from paceline.errors import ConfigError

Kept = TypeVar("Kept")


def read_kept(path: Path, kind: type[Kept]) -> list[Kept]:
    """What a file holds; nothing if there is none. A last line that was cut off is taken away."""
    if not path.exists():
        return []
    whole, _, cut_off = path.read_bytes().rpartition(b"\n")
    if cut_off:
        os.truncate(path, path.stat().st_size - len(cut_off))
    return [_decoded(path, number, line, kind) for number, line in enumerate(whole.splitlines(), 1)]


def keep(path: Path, result: object) -> None:
    """Add one more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def _decoded(path: Path, number: int, line: bytes, kind: type[Kept]) -> Kept:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"line {number} of {path} is no result of a run: {error}.") from None
