"""Whether a class of the user's own is a protocol, and if not, what is missing."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from inspect import isclass
from types import ModuleType
from typing import Any, get_type_hints

import msgspec

from paceline.errors import ConfigError
from paceline.protocols.core.peer import Peer

PACED = "decide(self, clocks, pushed)"
PEER = "iteration(self, me)"
HOW_TO = "See docs/how-to-write-a-protocol.md."


def check_protocol(name: str, found: Any) -> Any:
    """The class itself, if runs can be driven by it."""
    if not isclass(found):
        raise ConfigError(
            f"{name!r} is not a class, but of type {type(found).__name__}. Name a class. {HOW_TO}"
        )
    _check_methods(name, found)
    _check_dataclass(name, found)
    _check_settings(name, found)
    return found


def protocols_in(module: ModuleType) -> list[str]:
    """The classes of a file that look like protocols and are its own."""
    own = (x for x in vars(module).values() if isclass(x) and x.__module__ == module.__name__)
    return [cls.__name__ for cls in own if not _missing(cls)]


def _check_methods(name: str, cls: type) -> None:
    missing = _missing(cls)
    if missing:
        raise ConfigError(f"class {name!r} is not a protocol: {missing}. {HOW_TO}")


def _missing(cls: type) -> str:
    """What keeps a class from being a protocol of either family; nothing if it is one."""
    if issubclass(cls, Peer):
        return "" if cls.iteration is not Peer.iteration else f"it derives from Peer but has no {PEER}"
    if callable(getattr(cls, "iteration", None)):
        return f"it has {PEER}, but does not derive from paceline.protocols.Peer"
    if not callable(getattr(cls, "decide", None)):
        return (
            f"it has neither {PACED}, as a paced protocol, nor {PEER}, as a peer one that derives from Peer"
        )
    if not isinstance(getattr(cls, "lockstep", None), bool):
        return "it has decide(), but no `lockstep: ClassVar[bool]` (False unless all wait for all)"
    return ""


def _check_dataclass(name: str, cls: Any) -> None:
    if not is_dataclass(cls) or "__dataclass_fields__" not in vars(cls):
        raise ConfigError(
            f"class {name!r} is not a dataclass. Write @dataclass(frozen=True) above it. {HOW_TO}"
        )
    remembers = any(not field.init for field in fields(cls))
    frozen, is_peer = vars(cls)["__dataclass_params__"].frozen, issubclass(cls, Peer)  # type: ignore[arg-type]
    if frozen or (remembers and not is_peer):
        return
    why = "and a peer protocol keeps its state in `me`" if is_peer else "and it remembers nothing"
    raise ConfigError(
        f"the settings of class {name!r} could change in a run: its dataclass is not frozen, {why}. Write "
        "@dataclass(frozen=True)."
    )


def _check_settings(name: str, cls: Any) -> None:
    """Every setting has a type that can be written on a command line and in a file."""
    try:
        hints = get_type_hints(cls)
    except Exception as error:
        raise ConfigError(f"the types of the fields of class {name!r} cannot be read: {error}.") from None
    for field in fields(cls):
        if field.init and not _is_plain(hints[field.name]):
            raise ConfigError(
                f"setting {field.name} of class {name!r} has a type that cannot be given with --set: "
                f"{hints[field.name]!r}. Use numbers, words, true and false, or lists of them."
            )


def _is_plain(kind: Any) -> bool:
    """Whether values of this type can be written as JSON and read again."""
    try:
        msgspec.json.schema(kind)
    except TypeError:
        return False
    return True


def looks_like_one(value: object) -> bool:
    """Whether this is meant to be a protocol's object, complete or not."""
    return not isclass(value) and (hasattr(value, "decide") or hasattr(value, "iteration"))
