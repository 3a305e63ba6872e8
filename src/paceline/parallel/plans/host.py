"""This machine: what it is, and how much memory it has left."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from paceline.plan.profile.units import GIB


def this_host() -> str:
    """The machine, in words that stay the same."""
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    kind = names[0].partition(":")[2].strip() if names else platform.machine()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{os.cpu_count()} x {kind}, {total / GIB:.1f} GiB"


def available_bytes() -> int:
    """Memory of this machine that is not in use."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 8 * GIB
