"""What a process prints, in a file: on a full disk lines are lost, never the process that printed them."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any


class Output(io.FileIO):
    """A file that takes what there is room for."""

    def write(self, data: Any, /) -> int:
        """As much as goes; the rest counts as written, or every `print` of a script would raise."""
        with contextlib.suppress(OSError):
            return super().write(data) or 0
        return memoryview(data).nbytes


def print_to(out: int, errors: int) -> None:
    """Let Python print to these descriptors."""
    sys.stdout, sys.stderr = (_text(fd) for fd in (out, errors))


def _text(fd: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(Output(fd, "w", closefd=False)), line_buffering=True)
