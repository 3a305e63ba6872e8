"""Rows on their way to a worker: a file of this host that has no name, written once and read every epoch.

It vanishes with its last reader, so nothing is left behind, however a worker ends. A row is msgpack behind
its length. The writer is no worker, so this does not import torch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from paceline.decoding import decode_message
from paceline.errors import ConfigError

LENGTH = 4
"""Bytes that say how long a row is."""


@contextmanager
def spooled(rows: Iterable[Any], wanted: bool = True) -> Iterator[int | None]:
    """All rows in a file, by its number; None when they are not wanted."""
    if not wanted:
        yield None
        return
    encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
    with tempfile.TemporaryFile(dir=_folder()) as file:
        for row in rows:
            data = encoder.encode(row.asDict(recursive=True) if hasattr(row, "asDict") else row)
            file.write(len(data).to_bytes(LENGTH, "little") + data)
        file.flush()
        yield file.fileno()


def scan(path: str) -> Iterator[int]:
    """Where each row begins."""
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        while (start := file.tell()) < end:
            yield start
            file.seek(int.from_bytes(file.read(LENGTH), "little"), os.SEEK_CUR)


def read_rows(path: str, starts: Iterable[int]) -> Iterator[Any]:
    """The rows that begin there, in this order."""
    with open(path, "rb") as file:
        for start in starts:
            file.seek(start)
            yield decode_message(file.read(int.from_bytes(file.read(LENGTH), "little")))


def _folder() -> str | None:
    """Where Spark would like its tasks to put such things."""
    return os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or None


def _plain(value: Any) -> Any:
    """Vectors and arrays, of Spark's or numpy's, as lists."""
    value = value.toArray() if hasattr(value, "toArray") else value
    if hasattr(value, "tolist"):
        return value.tolist()
    kind = type(value).__name__
    raise ConfigError(
        f"a row holds a {kind}, which has no plain form. Select numbers, text, bytes, lists of them."
    )
