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
from textwrap import dedent
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from paceline.errors import ConfigError, unknown
from paceline.protocols import PACED, PEERS, own
from paceline.protocols.core.base import Pacing
from paceline.protocols.core.peer import Peer
from paceline.protocols.own_checks import looks_like_one

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
    when: str
    """In which situation it is the one to use."""
    settings: tuple[Setting, ...]
    body: str = ""
    """The rest of what it says: paragraphs, as they stand there."""
    source: str = ""
    """The file or the installed module of a protocol of one's own."""


def make(name: str, settings: Mapping[str, Any] | None = None) -> Pacing:
    """Build a paced protocol. Values may be strings, as `--set` gives them."""
    cls = class_of(name)
    if issubclass(cls, Peer):
        raise ConfigError(
            f"protocol {name!r} is of the peer family, and a paced one is needed here. "
            f"Use one of: {', '.join(sorted(PACED))}."
        )
    made: Pacing = build(name, cls, settings)
    return made


def make_peer(name: str, settings: Mapping[str, Any] | None = None) -> Peer:
    """Build a peer protocol."""
    cls = class_of(name)
    assert issubclass(cls, Peer), f"{name} is a peer protocol"
    made: Peer = build(name, cls, settings)
    return made


def make_any(name: str, settings: Mapping[str, Any] | None = None) -> Pacing | Peer:
    """Build a protocol of whichever family it is."""
    return make_peer(name, settings) if is_peer(name) else make(name, settings)


def class_of(name: str) -> type[Pacing] | type[Peer]:
    """The class under this name: of the package, of a file (`my_rules.py:HalfWay`), or installed."""
    found = PACED.get(name) or PEERS.get(name) or own.find(name)
    if found is None:
        raise unknown("protocol", name, {**PACED, **PEERS, **own.offered()})
    return found


def is_peer(name: str) -> bool:
    """Whether the protocol under this name is of the peer family."""
    return issubclass(class_of(name), Peer)


def spelled_out(protocol: object) -> tuple[str, dict[str, Any]]:
    """The name and settings by which other processes build the same protocol as this object."""
    if not looks_like_one(protocol):
        what = f"the class {protocol.__name__}" if isinstance(protocol, type) else f"{protocol!r}"
        raise ConfigError(f"join takes a protocol's name or object, as HalfWay(near=2); got {what}.")
    cls: Any = type(protocol)
    builtin = (name for name, each in {**PACED, **PEERS}.items() if each is cls)
    name = next(builtin, None) or own.named(cls)
    try:
        settings = msgspec.to_builtins(resolved(protocol))  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"the settings of {name!r} cannot be sent to other processes: {error}.") from None
    return name, settings


def build(name: str, cls: type[Any], settings: Mapping[str, Any] | None) -> Any:
    """A dataclass of settings from values that may be strings."""
    types = _setting_types(cls)
    values = {key: _convert(name, key, value, types) for key, value in (settings or {}).items()}
    missing = [f.name for f in _without_default(cls) if f.name not in values]
    if missing:
        raise ConfigError(f"protocol {name!r} needs its setting {missing[0]}. Add --set {missing[0]}=VALUE.")
    return cls(**values)


def _without_default(cls: type[Any]) -> list[Any]:
    return [f for f in fields(cls) if f.init and f.default is MISSING and f.default_factory is MISSING]


def resolved(protocol: Pacing | Peer) -> dict[str, Any]:
    """The settings a protocol really has, defaults included."""
    return {f.name: getattr(protocol, f.name) for f in fields(protocol) if f.init}  # type: ignore[arg-type]


def about(name: str) -> About:
    """Name, paper, promise and settings, read from the protocol's own file."""
    cls = class_of(name)
    family = "peer" if issubclass(cls, Peer) else "paced"
    return about_class(name, family, cls, mine=name not in PACED and name not in PEERS)


def about_class(name: str, family: str, cls: type[Any], mine: bool = False) -> About:
    """The same for a class of whatever family; `mine`: it is a user's own."""
    doc = (_own_doc(cls) if mine else "") or inspect.getdoc(sys.modules[cls.__module__]) or ""
    title, *rest = doc.split("\n\n")
    body = "\n\n".join(text for text in rest if not text.startswith(("Paper:", "Promise:", "When:")))
    return About(
        name,
        family,
        " ".join(title.split()) if mine else title.split("\n", 1)[0],
        _paragraph(doc, "Paper"),
        _paragraph(doc, "Promise"),
        _paragraph(doc, "When"),
        _settings(cls),
        body,
        (inspect.getsourcefile(cls) or "") if mine else "",
    )


def _own_doc(cls: type) -> str:
    """What a class says of itself, unless that is what a dataclass says of every class."""
    doc = inspect.cleandoc(vars(cls).get("__doc__") or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc


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
            if f.default_factory is not MISSING:
                default = f.default_factory()
            hint = hints[f.name]
            kind = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            out.append(Setting(f.name, kind, default, docs.get(f.name, "")))
    return tuple(out)


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal below each field of a dataclass."""
    body = ast.parse(dedent(inspect.getsource(cls))).body[0]
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
