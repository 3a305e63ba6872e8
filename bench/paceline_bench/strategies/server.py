"""The memory of a parameter server: the process that holds the store, as the local engine starts it.

It notes what it has before the run. When training is over, and before weights are saved, the first worker
reads the most that it has had. Memory that it shares with workers counts; what it has mapped of files (the
code of libraries) does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from paceline.config import RunConfig
from paceline.decoding import decode_json
from paceline.fabric.channel import Channel
from paceline.runtime.serve import serve

NOTE = "server.json"


class ServerNote(msgspec.Struct, frozen=True):
    """Which process it is, and what it had before the run."""

    pid: int
    before_bytes: int


def serve_noted(config: RunConfig, workers: list[tuple[Channel, int]], stop: int) -> int:
    """Hold the store as always; the note lies in the run's folder."""
    own = os.getpid()
    note = ServerNote(own, _without_files(own, "VmRSS"))
    (Path(config.folder) / NOTE).write_bytes(msgspec.json.encode(note))
    return serve(config, workers, stop)


def server_peak(folder: Path) -> int | None:
    """The most that the server of a run had at a time, beyond what it had before; None: it left no note."""
    path = folder / NOTE
    if not path.exists():
        return None
    note = decode_json(path.read_bytes(), kind=ServerNote)
    return max(0, _without_files(note.pid, "VmHWM") - note.before_bytes)


def shared_bytes() -> int:
    """What this process has now in memory that others may have as well."""
    return _status(os.getpid())["RssShmem"]


def _without_files(pid: int, field: str) -> int:
    seen = _status(pid)
    return seen[field] - seen["RssFile"]


def _status(pid: int) -> dict[str, int]:
    """Sizes of a process in bytes, by the kernel's names."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    named = (line.partition(":")[::2] for line in lines if line.endswith(" kB"))
    return {name: 1024 * int(size.split()[0]) for name, size in named}
