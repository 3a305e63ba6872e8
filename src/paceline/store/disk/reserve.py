"""Room on the disk for the end of a run, taken at its beginning.

A file without a name holds it: when the process ends, in whatever way, nothing is left of it. It is given
back just before the weights, the last checkpoint and the result are written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path
from typing import IO

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SPARE_BYTES = 1 << 20
"""For the last lines of the trace and of logs."""


class Reserve:
    """So many bytes of a folder's disk, until they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: IO[bytes] | None = None

    def take(self, size_bytes: int) -> list[str]:
        """Hold them; or what to warn of, if there are not so many. Disks that cannot say are left alone."""
        self.release()
        needed = size_bytes + SPARE_BYTES
        try:
            self._held = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            os.posix_fallocate(self._held.fileno(), 0, needed)
        except OSError as error:
            self.release()
            if error.errno not in NO_ROOM:
                return []
            return [
                f"the end of this run (weights and checkpoint) takes up to {needed / 1e6:,.0f} MB, and "
                f"{free_bytes(self._folder) / 1e6:,.0f} MB are free at {self._folder}. Make room, or it "
                "may be lost"
            ]
        return []

    def release(self) -> None:
        """Give them back."""
        held, self._held = self._held, None
        if held is not None:
            with contextlib.suppress(OSError):
                held.close()


def free_bytes(folder: Path) -> int:
    """What is left of a folder's disk for its user."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def no_room(error: BaseException) -> bool:
    """Whether the disk, or what its user may have of it, is full. safetensors tells in words only."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return True
    return any(f"(os error {number})" in str(error) for number in NO_ROOM)


def not_saved(what: str, error: BaseException, folder: Path) -> str:
    """For people: what could not be written, why, and what to do about it."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    left = f" ({free_bytes(folder) / 1e6:,.1f} MB are free)" if no_room(error) else ""
    return (
        f"{what} could not be written to {folder}: {why.rstrip('.')}{left}. Make room or choose another disk "
        "with --runs; --trace-limit bounds the trace, --keep 1 keeps one checkpoint only."
    )
