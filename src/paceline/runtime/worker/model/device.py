"""The device that a model lies on."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ConfigError


def one_device(tensors: list[Tensor]) -> torch.device:
    """Where all of these lie."""
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(
            f"the model lies on several devices ({names}). Give every worker a model on one device."
        )
    return devices.pop()


def synchronize(device: torch.device) -> None:
    """Wait until what was begun there is done."""
    torch.accelerator.synchronize(device)
