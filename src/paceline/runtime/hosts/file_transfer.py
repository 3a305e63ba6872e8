"""A peer's own files, between the host where it is and the run's folder.

A worker that is stopped writes down where it stood, and reads it when the run goes on. On another host that
happens in a folder of its host's, and the files travel: to the run's folder when the worker leaves, and back
when it begins. They have fixed names and are never looked into on the way.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import RunError

KINDS = ("safetensors", "optimizer.safetensors", "json")
"""The last one is written last."""


def file_of(folder: Path, rank: int | None, kind: int) -> Path:
    """Where a file of a worker is, or is to be."""
    if rank is None or kind not in range(len(KINDS)):
        raise RunError(f"a file of kind {kind} of rank {rank} is none of a peer's.")
    return folder / f"rank{rank}.{KINDS[kind]}"


def files_of(folder: Path, rank: int | None) -> list[tuple[int, memoryview]]:
    """All files of a worker; none, unless all are there."""
    paths = [file_of(folder, rank, kind) for kind in range(len(KINDS))]
    if not all(path.is_file() for path in paths):
        return []
    return [(kind, memoryview(path.read_bytes())) for kind, path in enumerate(paths)]


def keep(folder: Path, rank: int | None, kind: int, content: memoryview) -> None:
    """A file has arrived."""
    path = file_of(folder, rank, kind)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
