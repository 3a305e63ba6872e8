"""Anonymous shared memory: nothing has a name, so nothing can be left behind.

A segment is a memfd. Its descriptor is handed to another process over a socket; when the last
process that maps it is gone, so is the memory, whoever was killed how. It is sealed against
resizing, and can be sealed so that whoever receives it may only read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import warnings

import torch
from torch import Tensor

from paceline.errors import ConfigError, RunError

F_SEAL_FUTURE_WRITE = 0x10  # fcntl has no name for it yet


class Segment:
    """A piece of shared memory as a flat tensor of bytes."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.writable = writable
        """Whether this process may write to it."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.map = mmap.mmap(fd, size_bytes, access=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            self.bytes: Tensor = torch.frombuffer(self.map, dtype=torch.uint8)

    @classmethod
    def create(cls, size_bytes: int, what: str, used_bytes: int | None = None) -> Segment:
        """New zeroed memory, after a look whether there is room for it, or for what will be used of it."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(f"the one-host store needs Linux (memfd), this is {sys.platform}.")
        check_room(size_bytes if used_bytes is None else used_bytes, what)
        fd = os.memfd_create(f"paceline-{what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            return cls(fd, size_bytes)
        except OSError as error:
            os.close(fd)
            raise RunError(f"could not get {_mb(size_bytes)} of memory for {what}: {error}.") from None

    def seal_for_readers(self) -> None:
        """From now on nobody can map it for writing; existing mappings stay as they are."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)

    def close_fd(self) -> None:
        """Close the descriptor; the mapping lives on with the tensors that view it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def check_room(size_bytes: int, what: str) -> None:
    """Refuse early: memory handed out lazily would otherwise end in a kill."""
    free = min(_available_bytes(), _cgroup_room_bytes())
    if size_bytes > free:
        raise ConfigError(
            f"{what} needs {_mb(size_bytes)} of shared memory, {_mb(free)} are available. "
            "Use fewer workers, a smaller model, or a machine with more memory."
        )


def _available_bytes() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return sys.maxsize


def _cgroup_room_bytes() -> int:
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit, usage in pairs:
        try:
            with open(limit) as top, open(usage) as used:
                text = top.read().strip()
                return sys.maxsize if text == "max" else max(0, int(text) - int(used.read()))
        except (OSError, ValueError):
            continue
    return sys.maxsize


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
