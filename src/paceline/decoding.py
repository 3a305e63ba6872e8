"""Bytes from a network or a file, as typed values. Everything that decodes does so here.

Decoders raise many things about bytes that are not what they should be (text that is no UTF-8, numbers that
are too large, nesting that is too deep). Here it is one: `RunError` for a message, `Undecodable` for a file.
"""

from __future__ import annotations

import tomllib
from typing import Any, Generic, TypeVar, overload

import msgspec

from paceline.errors import RunError, Undecodable

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
MALFORMED = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""What the decoders raise; UnicodeDecodeError and TOMLDecodeError are ValueErrors."""


class MessageDecoder(Generic[T]):
    """Decodes messages of one kind."""

    def __init__(self, kind: Any) -> None:
        """`kind`: a type, or a union of tagged ones."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: Bytes) -> T:
        """The message; a RunError if it is none."""
        try:
            return self._decoder.decode(data)
        except MALFORMED as error:
            raise _not_ours(data, error) from None


@overload
def decode_message(data: Bytes, kind: type[T]) -> T: ...


@overload
def decode_message(data: Bytes, kind: Any = Any) -> Any: ...


def decode_message(data: Bytes, kind: Any = Any) -> Any:
    """The one message of its kind; a RunError if it is none."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except MALFORMED as error:
        raise _not_ours(data, error) from None


def _not_ours(data: Bytes, error: Exception) -> RunError:
    return RunError(f"a message of {len(data)} bytes that is not ours: {error}")


class JsonDecoder(Generic[T]):
    """Decodes lines of one kind."""

    def __init__(self, kind: Any) -> None:
        """`kind`: a type, or a union of tagged ones."""
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)

    def decode(self, data: Bytes | str) -> T:
        """What it says; `Undecodable` if it says nothing of the kind."""
        try:
            return self._decoder.decode(data)
        except MALFORMED as error:
            raise Undecodable(str(error)) from None


@overload
def decode_json(data: Bytes | str, kind: type[T]) -> T: ...


@overload
def decode_json(data: Bytes | str, kind: Any = Any) -> Any: ...


def decode_json(data: Bytes | str, kind: Any = Any) -> Any:
    """What a file, or another program, says in JSON."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise Undecodable(str(error)) from None


def decode_toml(data: bytes) -> dict[str, Any]:
    """What a file says in TOML."""
    try:
        return tomllib.loads(decode_text(data))
    except MALFORMED as error:
        raise Undecodable(str(error)) from None


def decode_text(data: bytes) -> str:
    """Text in UTF-8, whatever the locale."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Undecodable(str(error)) from None
