"""Which testbeds there are: one folder each, below /run, with what it was made of and who owns it.

A testbed that a process made for itself is owned by it: when that process is gone, the testbed is stale,
and anybody may take it down. One made by the command line is owned by nobody and stays until told.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.decoding import decode_json
from paceline.errors import ConfigError, Undecodable, unknown
from paceline.testbed.spec import Spec

STATE = Path("/run/paceline-testbed")


class BedOwner(msgspec.Struct, frozen=True):
    """A process, such that no later one with the same id is taken for it."""

    pid: int
    start: str
    """When it started, and in which life of the machine."""

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _start(self.pid) == self.start


class BedRecord(msgspec.Struct, frozen=True):
    """What is known of a testbed."""

    spec: Spec
    owner: BedOwner | None
    groups: dict[str, str] = {}
    """The file by which a process joins a host's control group, where it has one."""

    @property
    def stale(self) -> bool:
        """Its owner is gone."""
        return self.owner is not None and not self.owner.alive


def this_process() -> BedOwner:
    """The calling process as an owner."""
    return BedOwner(os.getpid(), _start(os.getpid()))


def _start(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else f"{boot} {stat[19]}"


@contextlib.contextmanager
def exclusively() -> Iterator[None]:
    """One process at a time makes or removes testbeds."""
    try:
        STATE.mkdir(mode=0o755, parents=True, exist_ok=True)
        file = (STATE / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"cannot keep records of testbeds in {STATE}: {error.strerror}.") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:  # said aloud: a process forked in the meantime holds the same lock
            fcntl.flock(file, fcntl.LOCK_UN)


def folder_of(bed: str) -> Path:
    """Where a testbed's record is."""
    return STATE / bed


def write(record: BedRecord) -> None:
    """Keep a record, whole or not at all."""
    path = folder_of(record.spec.name) / "record.json"
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_bytes(msgspec.json.encode(record))
    beside.replace(path)


def read(bed: str) -> BedRecord | None:
    """None when there is no such testbed, or only the beginnings of one."""
    try:
        return decode_json((folder_of(bed) / "record.json").read_bytes(), kind=BedRecord)
    except (OSError, Undecodable):
        return None


def names() -> list[str]:
    """All testbeds, half-made ones included."""
    return sorted(path.name for path in STATE.iterdir() if path.is_dir()) if STATE.is_dir() else []


def forget(bed: str) -> None:
    """Remove a record. The last thing to do."""
    shutil.rmtree(folder_of(bed), ignore_errors=True)


def the_one(name: str | None) -> str:
    """The testbed of that name; without one, the only testbed that no process owns."""
    there = names()
    if name in there:
        return name
    if name is not None and there:
        raise unknown("testbed", name, there)
    kept = [each for each in there if (record := read(each)) is not None and record.owner is None]
    if len(kept) == 1 and name is None:
        return kept[0]
    if not kept:
        owned = f" Of running processes there are: {', '.join(there)}." if there else ""
        raise ConfigError(f"no testbed is up.{owned} Start one: paceline testbed up FILE.")
    raise ConfigError(f"{len(kept)} testbeds are up: {', '.join(kept)}. Say which by its name.")
