"""Tensors in a file, with the permissions that all files of a run have: those of the user's umask.

safetensors writes files that only their owner may read, whatever the umask; beside others that all may read
that is neither private nor shared. Secrets alone are always their owner's only.
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

USUAL_UMASK = 0o022


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    save_file(tensors, path)
    os.chmod(path, 0o666 & ~umask())


def umask() -> int:
    """This process's; asking the system for it would change it for a moment, in all threads."""
    try:
        with open("/proc/self/status") as file:
            told = next((line for line in file if line.startswith("Umask:")), "")
        return int(told.split()[1], 8)
    except (OSError, IndexError, ValueError):
        return USUAL_UMASK
