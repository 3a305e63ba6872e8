"""An optimizer's memory on its way between a script's optimizer and the one that steps in its place.

A script saves and loads `optimizer.state_dict()` as it would alone; the state itself lives where steps are
taken. It travels as tensors in shared memory, with their places named in a message, and plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.fabric.segment import Segment
from paceline.store.layout import ALIGN, Slot

State = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors and plain values, both under `number.name`: the number of a trained parameter in its optimizer."""


def state_of(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor]) -> State:
    """What an optimizer remembers of these parameters."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for number, parameter in enumerate(trained):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{number}.{key}"] = value.detach()
            else:
                values[f"{number}.{key}"] = value
    return tensors, values


def give_state(optimizer: torch.optim.Optimizer, trained: Sequence[Tensor], state: State) -> None:
    """Let an optimizer remember this, and nothing else."""
    optimizer.state.clear()
    for name, value in [*state[0].items(), *state[1].items()]:
        number, key = name.split(".", 1)
        optimizer.state[trained[int(number)]][key] = value


def in_order(optimizer: torch.optim.Optimizer, index: dict[int, int]) -> list[Tensor]:
    """The trained parameters as the optimizer has them."""
    everything: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
    return [p for p in everything if id(p) in index]


def packed(tensors: dict[str, Tensor]) -> tuple[tuple[Slot, ...], Segment]:
    """Tensors side by side in memory that can be handed to another process, and where each lies."""
    slots, size = [], 0
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        stride = tuple(torch.empty(shape, device="meta").stride())
        slots.append(Slot(name, str(tensor.dtype), shape, stride, size))
        size += -(-slots[-1].size_bytes // ALIGN) * ALIGN
    memory = Segment.create(max(size, ALIGN), "an optimizer's state")
    for slot in slots:
        slot.view(memory.bytes, slot.offset).copy_(tensors[slot.name])
    return tuple(slots), memory


def unpacked(slots: Sequence[Slot], fd: int) -> dict[str, Tensor]:
    """The tensors, in memory of our own."""
    size = max((slot.offset + slot.size_bytes for slot in slots), default=ALIGN)
    memory = Segment(fd, max(size, ALIGN), writable=False)
    memory.close_fd()
    return {slot.name: slot.view(memory.bytes, slot.offset).clone() for slot in slots}
