"""Lets a worker keep the memory that it frees.

The C library gives freed memory at the top of its heap back to the system, and asks for it again for the
next batch's activations: every page is then cleared and mapped anew, in every iteration. A worker that
trains small models on the CPU spends up to a fifth of its time so.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**31 - 1
LARGEST_BYTES = 32 << 20
"""The largest block that glibc takes from its heap, and not from the system."""


def keep_freed_memory() -> bool:
    """Do so from now on; unless the user has chosen by glibc's own variables, or the C library is another."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_BYTES))
