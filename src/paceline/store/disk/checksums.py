"""Checksums of a checkpoint: written beside its files, and compared before anything is read from them.

One manifest holds the size and SHA-256 of every file, and a SHA-256 of itself. A checkpoint without one was
written by a version that made none: it is taken as it is, with a note.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, TraceError, Undecodable
from paceline.store.disk.folders import all_saved_in

MANIFEST = "checksums.json"
SINCE = 2
"""The version of checkpoints from which on there is a manifest."""


class DamagedCheckpoint(TraceError, ConfigError):
    """A file of a checkpoint is not what was written."""


class Sum(msgspec.Struct, frozen=True):
    """What a file was when it was written."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What all files were; `sha256` is of `files`."""

    files: dict[str, Sum]
    sha256: str


class _Version(msgspec.Struct, frozen=True):
    checkpoint: int = 1


def write_manifest(folder: Path) -> None:
    """Add the checksums of all files that are there."""
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)
    files = {path.name: _sum(path) for path in paths}
    text = msgspec.json.format(msgspec.json.encode(Manifest(files, _own(files))))
    (folder / MANIFEST).write_bytes(text)


def verify(folder: Path, stem: str = "") -> None:
    """Compare all files with the manifest, or those that begin with `stem`; raises if one differs."""
    manifest = _manifest(folder)
    for name, expected in {} if manifest is None else manifest.files.items():
        if name.startswith(stem):
            _compare(folder, name, expected)


def unchecked(folder: str | None) -> list[str]:
    """What people should be told of a checkpoint that has no checksums."""
    if folder is None or (Path(folder) / MANIFEST).exists():
        return []
    return [f"the checkpoint at {folder} has no checksums, as in earlier versions: damage would go unnoticed"]


def newest_sound(run: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a run that is not damaged, and what is wrong with those after it.

    Raises for the newest if there are some and all are damaged.
    """
    damages: list[DamagedCheckpoint] = []
    for folder in all_saved_in(run):
        try:
            verify(folder)
        except DamagedCheckpoint as error:
            damages.append(error)
        else:
            return folder, [f"{error} Going on from the one before it, {folder}." for error in damages]
    if damages:
        others = f" So are the {len(damages) - 1} before it." if len(damages) > 1 else ""
        raise DamagedCheckpoint(f"{damages[0]}{others} There is none before it to go on from; begin anew.")
    return None, []


def size_of(folder: Path) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _compare(folder: Path, name: str, expected: Sum) -> None:
    path = folder / name
    try:
        found = path.stat().st_size
        if found != expected.size_bytes:
            raise _damaged(folder, f"{name} has {found} bytes, {expected.size_bytes} were written")
        if _sum(path) != expected:
            raise _damaged(folder, f"{name} differs from what was written (its SHA-256 does not match)")
    except FileNotFoundError:
        raise _damaged(folder, f"{name} is missing") from None
    except OSError as error:
        raise _damaged(folder, f"{name} cannot be read: {error.strerror}") from None


def _manifest(folder: Path) -> Manifest | None:
    """None: the checkpoint is of a version that wrote none."""
    try:
        found = decode_json((folder / MANIFEST).read_bytes(), kind=Manifest)
    except FileNotFoundError:
        if _expects_manifest(folder):
            raise _damaged(folder, f"{MANIFEST} is missing") from None
        return None
    except (OSError, Undecodable) as error:
        raise _damaged(folder, f"{MANIFEST} cannot be read: {error}") from None
    if found.sha256 != _own(found.files):
        raise _damaged(folder, f"{MANIFEST} differs from what was written")
    return found


def _expects_manifest(folder: Path) -> bool:
    for name in ("state.json", "lone.json"):
        try:
            told = decode_json((folder / name).read_bytes(), kind=_Version)
        except (OSError, Undecodable):
            continue
        return told.checkpoint >= SINCE
    return False


def _damaged(folder: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"the checkpoint at {folder} is damaged: {what}.")


def _sum(path: Path) -> Sum:
    with path.open("rb") as file:
        return Sum(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _own(files: dict[str, Sum]) -> str:
    return hashlib.sha256(msgspec.json.encode(files, order="sorted")).hexdigest()
