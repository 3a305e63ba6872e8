"""A worker's view of weights that others write: what is written here nobody else sees, and it can be told and
undone. Used by the binding of a model whose weights come from a store.

It is a private mapping of a segment. The kernel copies a page when it is first written to here, and says in
/proc/self/pagemap which pages those are. All others show what the segment holds, at any time and at no cost.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch
from torch import Tensor

from paceline.fabric.segment import Segment

_ENTRY_BYTES = 8
_FILE, _SWAPPED_OR_PRESENT = 61, 62
"""The first bits of a page's entry that tell: whether it is the segment's still, and whether it is there."""


class PrivateView:
    """One segment as one process may write to it."""

    def __init__(self, segment: Segment) -> None:
        self._map = mmap.mmap(segment.fd, segment.size_bytes, access=mmap.ACCESS_COPY)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pages = -(-segment.size_bytes // mmap.PAGESIZE)
        self._first = self.bytes.data_ptr() // mmap.PAGESIZE
        self._clean = b""
        """What the kernel said when last nothing was written: mostly it says the same again."""
        try:
            self._pagemap = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._pagemap = -1

    def written(self) -> list[tuple[int, int]] | None:
        """Where something was written, in bytes, in whole pages; None: this system does not tell."""
        if self._pagemap < 0:
            return None
        data = os.pread(self._pagemap, self._pages * _ENTRY_BYTES, self._first * _ENTRY_BYTES)
        if data == self._clean:
            return []
        entries = np.frombuffer(data, dtype=np.uint64)
        if len(entries) < self._pages:
            return None
        own = (entries >> np.uint64(_SWAPPED_OR_PRESENT) != 0) & (entries >> np.uint64(_FILE) & 1 == 0)
        if not own.any():
            self._clean = data
            return []
        edges = np.flatnonzero(np.diff(own, prepend=False, append=False)) * mmap.PAGESIZE
        return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]

    def undo(self, written: list[tuple[int, int]] | None) -> None:
        """Show what the segment holds again where something was written; None: everywhere."""
        for start, stop in [(0, len(self._map))] if written is None else written:
            self._map.madvise(mmap.MADV_DONTNEED, start, min(stop, len(self._map)) - start)
