"""Traces on disk: written in batches, read whole or while they grow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from paceline.decoding import JsonDecoder, decode_json
from paceline.errors import NoTrace, TraceError, Undecodable
from paceline.trace.events import SCHEMA, AnyEvent, Event, RunStarted

_encoder = msgspec.json.Encoder(decimal_format="number")
_decoder: JsonDecoder[AnyEvent] = JsonDecoder(AnyEvent)


def decode(line: bytes) -> AnyEvent:
    """The event of one line."""
    return _decoder.decode(line)


class TraceWriter:
    """Appends events to a file. Cheap: encoding is about a microsecond, writes are batched."""

    def __init__(self, path: Path, batch_bytes: int = 1 << 16) -> None:
        self._file = path.open("ab", buffering=0)
        self._pending = bytearray()
        self._written = 0
        self._batch_bytes = batch_bytes

    def write(self, event: Event) -> None:
        """Add an event; it reaches the file with its batch, or at `flush`."""
        _encoder.encode_into(event, self._pending, -1)
        self._pending += b"\n"
        if len(self._pending) >= self._batch_bytes:
            self.flush()

    @property
    def pending(self) -> bool:
        """Whether something is not in the file yet."""
        return bool(self._pending)

    @staticmethod
    def _encoded(event: Event) -> bytes:
        return _encoder.encode(event) + b"\n"

    @property
    def size_bytes(self) -> int:
        """How long it is by now, with what is not in the file yet."""
        return self._written + len(self._pending)

    def flush(self) -> None:
        """Let readers see everything written so far."""
        if self._pending:
            self._put(self._pending)
            self._written += len(self._pending)
            self._pending.clear()

    def _put(self, data: bytearray) -> None:
        """All of it, or nothing: a line that is cut off in the middle would spoil the rest."""
        start, rest = os.fstat(self._file.fileno()).st_size, memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), start)
            raise
        finally:
            rest.release()

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; a reader sees all of it or what was there before, also when there is no room."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class LineTail:
    """Reads the lines of a file while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new_lines(self) -> list[bytes]:
        """Those that were completed since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].splitlines()


class TraceTail:
    """Reads a trace while it grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail, self._read = path, LineTail(path), 0

    def new_events(self) -> list[AnyEvent]:
        """The events that were completed since the last call."""
        lines = self._tail.new_lines()
        first, self._read = self._read + 1, self._read + len(lines)
        return [_decode(self._path, number, line) for number, line in enumerate(lines, first)]


def read_trace(path: Path) -> Iterator[AnyEvent]:
    """All events of a trace file or run folder. A last line cut off by a kill is left out."""
    path = path / "trace.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise NoTrace(f"no trace at {path}. Give a run folder, such as runs/latest.")
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(takewhile(_is_complete, file), 1):
            yield _decode(path, number, line)
    if not number:
        raise TraceError(f"{path} holds no event. The run has not begun, or was killed before it did.")


def _is_complete(line: bytes) -> bool:
    return line.endswith(b"\n")


def _decode(path: Path, number: int, line: bytes) -> AnyEvent:
    if number == 1:
        _check_schema(path, line)
    try:
        return _decoder.decode(line)
    except Undecodable as error:
        raise TraceError(f"{path}, line {number} is not a trace event: {error}.") from None


def _check_schema(path: Path, line: bytes) -> None:
    try:
        first: Any = decode_json(line)
    except Undecodable:
        first = None
    if not isinstance(first, dict) or first.get("event") != RunStarted.__struct_config__.tag:
        raise TraceError(f"{path} is not a Paceline trace: it does not begin with a run_started event.")
    if first.get("schema") != SCHEMA:
        raise TraceError(
            f"{path} has trace schema {first.get('schema')}, this version reads {SCHEMA}. "
            "Use the version of Paceline that wrote it."
        )
