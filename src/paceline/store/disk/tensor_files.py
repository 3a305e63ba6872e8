"""Tensors in a file, with the permissions that all files of a run have: those of the user's umask.

safetensors writes files that only their owner may read, whatever the umask; beside others that all may read
that is neither private nor shared. Secrets alone are always their owner's only.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save, save_file
from torch import Tensor, nn

from paceline.errors import ConfigError

USUAL_UMASK = 0o022


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    save_file(tensors, path)
    os.chmod(path, 0o666 & ~umask())


def check_can_be_saved(model: nn.Module) -> None:
    """Refuse a model with tensors that such a file cannot hold, before and not after it was trained."""
    named = {tensor.dtype: name for name, tensor in model.state_dict().items()}
    for dtype, name in named.items():
        try:
            save({"": torch.zeros(1, dtype=dtype)})
        except (KeyError, ValueError, RuntimeError):
            raise ConfigError(
                f"{name!r} of the model has the type {dtype}, which a run cannot save: safetensors has none "
                "such. Use another type, torch.complex64 for complex numbers."
            ) from None


def umask() -> int:
    """This process's; asking the system for it would change it for a moment, in all threads."""
    try:
        with open("/proc/self/status") as file:
            told = next((line for line in file if line.startswith("Umask:")), "")
        return int(told.split()[1], 8)
    except (OSError, IndexError, ValueError):
        return USUAL_UMASK
