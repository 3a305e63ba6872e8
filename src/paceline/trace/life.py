"""Whether a run still goes on: which process holds it, and whether that one is still there.

The holder (the store, or a lone worker) leaves its process in `owner.json`. A trace without an end whose
holder is gone is of a run that was interrupted: nobody is left who could write how it ended.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from paceline.decoding import decode_json
from paceline.errors import Undecodable
from paceline.trace.events import Event, RunEnded
from paceline.trace.files import TraceWriter, read_trace, write_whole
from paceline.trace.tally import Result, Tally, tally

PF_EXITING = 0x4


class Process(msgspec.Struct, frozen=True):
    """A process that no other can be mistaken for."""

    pid: int
    began: int
    """When it was started, in ticks since the machine was."""
    boot: str
    """Which start of which machine."""
    host: str

    @property
    def here(self) -> bool:
        """Whether it is, or was, one of this machine."""
        return self.host == socket.gethostname()

    @property
    def alive(self) -> bool:
        """Whether it is still running. A process on another machine is assumed to be."""
        if not self.here:
            return True
        return self.boot == _boot() and _began(self.pid) == self.began


def this_process(pid: int) -> Process:
    """A process of this machine, as it is now."""
    return Process(pid, _began(pid) or 0, _boot(), socket.gethostname())


def claim(folder: Path, pid: int) -> None:
    """This process holds the run from now on."""
    (folder / "owner.json").write_bytes(msgspec.json.encode(this_process(pid)))


def owner_of(folder: Path) -> Process | None:
    """The process that holds or held a run; None if unknown."""
    try:
        return decode_json((folder / "owner.json").read_bytes(), kind=Process)
    except (OSError, Undecodable):
        return None


def is_orphan(path: Path) -> bool:
    """Whether no process is left to write the end of a run."""
    owner = owner_of(path if path.is_dir() else path.parent)
    return owner is not None and not owner.alive


def read_tally(path: Path) -> Tally:
    """A run's trace added up; one that was interrupted is known as such."""
    total = tally(read_trace(path))
    total.interrupted = total.end is None and is_orphan(path)
    return total


def write_ending(folder: Path, status: str, detail: str, first: Callable[[], Event]) -> None:
    """The end of a trace whose writer was killed; `first` is what it begins with if nothing was written."""
    path = folder / "trace.jsonl"
    lines = path.read_bytes() if path.exists() else b""
    whole = lines.rfind(b"\n") + 1
    if whole < len(lines):  # half a line was written last
        with path.open("rb+") as file:
            file.truncate(whole)
    writer = TraceWriter(path)
    if not whole:
        writer.write(first())
    now = tally(read_trace(path)).now if whole else 0.0
    writer.write(RunEnded(now, status, detail))  # type: ignore[arg-type]
    writer.close()


def write_result(folder: Path) -> Result:
    """Add up the trace and save the result next to it."""
    result = read_tally(folder).result()
    write_whole(folder / "result.json", msgspec.json.format(msgspec.json.encode(result)))
    return result


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> int | None:
    """None: no such process, or one that is about to be gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    exiting = fields[0] in ("Z", "X") or int(fields[6]) & PF_EXITING
    return None if exiting else int(fields[19])
