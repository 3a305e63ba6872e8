"""Batches that count for nothing: a worker computes on one where a round of an epoch has nothing for it.

In a mean by samples such a gradient weighs nothing. A script that accumulates gradients over several batches
would add it to those of real samples all the same. So backward leaves zeros while such a batch is in hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Void:
    """One worker's."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """A batch that counts for nothing has reached the script."""
        if not self._hooks:
            self._hooks = [_zeroed(p) for p in self._parameters if p.requires_grad]

    def end(self) -> None:
        """It is behind us."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _zeroed(parameter: Tensor) -> Any:
    return parameter.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
