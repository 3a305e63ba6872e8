"""Reading and writing profile and plan files: JSON or TOML in, checked values out."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.decoding import decode_json, decode_toml
from paceline.errors import ConfigError, Undecodable

T = TypeVar("T")


def read_table(path: Path, what: str) -> Any:
    """The plain contents of a JSON file, or of a TOML one if it is named so."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}. Check the path.") from None
    try:
        return decode_toml(raw) if path.suffix == ".toml" else decode_json(raw)
    except Undecodable as error:
        raise ConfigError(f"the {what} {path} is neither JSON nor TOML that can be read: {error}.") from None


def checked(table: Any, kind: type[T], path: Path, what: str) -> T:
    """The table as a value of this type, or one sentence about what is wrong in it."""
    try:
        return msgspec.convert(table, kind, str_keys=True)  # keys are text in JSON and TOML
    except msgspec.ValidationError as error:
        raise ConfigError(f"the {what} {path}: {str(error).rstrip('.')}.") from None


def write_json(path: Path, value: Any) -> None:
    """As JSON that people can read."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}. Check the folder.") from None


def digest(value: Any) -> str:
    """Sixteen letters that differ when the value does; the same on every rank and machine."""
    plain = msgspec.to_builtins(value, str_keys=True)
    return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).hexdigest()[:16]
