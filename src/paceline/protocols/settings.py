"""A protocol by its name and settings, and what its file says about itself.

Every setting is written once, as a dataclass field with its docstring below; `--set`, `--help`,
`paceline protocols` and the reference page are all made from that.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from math import isnan
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from paceline.errors import ConfigError, unknown
from paceline.protocols import PACED, PEERS
from paceline.protocols.core.base import Pacing
from paceline.protocols.core.peer import Peer

T = TypeVar("T", bound=Pacing | Peer)


class Setting(msgspec.Struct, frozen=True):
    """One dial of a protocol."""

    name: str
    type: str
    default: Any
    help: str


class About(msgspec.Struct, frozen=True):
    """What a protocol's file says about itself."""

    name: str
    family: str
    title: str
    paper: str
    promise: str
    settings: tuple[Setting, ...]


def make(name: str, settings: Mapping[str, Any] | None = None) -> Pacing:
    """Build a paced protocol. Values may be strings, as `--set` gives them."""
    if name in PEERS:
        raise ConfigError(
            f"protocol {name!r} is of the peer family, and a paced one is needed here. "
            f"Use one of: {', '.join(sorted(PACED))}."
        )
    made: Pacing = build(name, _named(name, PACED), settings)
    return made


def make_peer(name: str, settings: Mapping[str, Any] | None = None) -> Peer:
    """Build a peer protocol."""
    made: Peer = build(name, _named(name, PEERS), settings)
    return made


def make_any(name: str, settings: Mapping[str, Any] | None = None) -> Pacing | Peer:
    """Build a protocol of whichever family it is."""
    return make_peer(name, settings) if name in PEERS else make(name, settings)


def _named(name: str, family: Mapping[str, type[T]]) -> type[T]:
    if name not in family:
        raise unknown("protocol", name, {**PACED, **PEERS})
    return family[name]


def build(name: str, cls: type[Any], settings: Mapping[str, Any] | None) -> Any:
    """A dataclass of settings from values that may be strings."""
    types = _setting_types(cls)
    values = {key: _convert(name, key, value, types) for key, value in (settings or {}).items()}
    return cls(**values)


def resolved(protocol: Pacing | Peer) -> dict[str, Any]:
    """The settings a protocol really has, defaults included."""
    return {f.name: getattr(protocol, f.name) for f in fields(protocol) if f.init}  # type: ignore[arg-type]


def about(name: str) -> About:
    """Name, paper, promise and settings, read from the protocol's own file."""
    cls: type[Pacing | Peer] = PEERS[name] if name in PEERS else PACED[name]
    return about_class(name, "peer" if name in PEERS else "paced", cls)


def about_class(name: str, family: str, cls: type[Any]) -> About:
    """The same for a class of whatever family."""
    doc = inspect.getdoc(sys.modules[cls.__module__]) or ""
    title = doc.split("\n", 1)[0]
    return About(name, family, title, _paragraph(doc, "Paper"), _paragraph(doc, "Promise"), _settings(cls))


def _setting_types(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def _convert(protocol: str, key: str, value: Any, types: dict[str, Any]) -> Any:
    if key not in types:
        if not types:
            raise ConfigError(f"protocol {protocol!r} has no settings, got {key}={value!r}. Leave it out.")
        raise unknown(f"setting of protocol {protocol!r}:", key, types)
    kind, choices = types[key], get_args(types[key]) if get_origin(types[key]) is Literal else ()
    try:
        converted = msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        if choices:
            raise unknown(f"{key} of protocol {protocol!r}:", str(value), map(str, choices)) from None
        what = {int: "takes a whole number", float: "takes a number", bool: "takes true or false"}
        words = what.get(kind, str(error))
        raise ConfigError(f"setting {key} of protocol {protocol!r} {words}, got {value!r}.") from None
    if isinstance(converted, float) and isnan(converted):
        raise ConfigError(f"setting {key} of protocol {protocol!r} takes a number, got {value!r}.")
    return converted


def _settings(cls: type[Any]) -> tuple[Setting, ...]:
    docs, hints = _field_docs(cls), _setting_types(cls)
    out = []
    for f in fields(cls):
        if f.init:
            default = None if f.default is MISSING else f.default
            hint = hints[f.name]
            kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            out.append(Setting(f.name, kind, default, docs.get(f.name, "")))
    return tuple(out)


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = getattr(below, "value", None)
            if isinstance(below, ast.Expr) and isinstance(value, ast.Constant):
                docs[field.target.id] = str(value.value)
    return docs


def _paragraph(doc: str, word: str) -> str:
    """The paragraph that begins with `word:`, on one line."""
    for paragraph in doc.split("\n\n"):
        if paragraph.startswith(f"{word}:"):
            return " ".join(paragraph.removeprefix(f"{word}:").split())
    return ""
