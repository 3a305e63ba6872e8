"""The owner's answer to a script that saves its optimizer: what the one remembers that steps for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from paceline.fabric.segment import Segment
from paceline.runtime.checkpoints.optimizer_state import packed
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.run import Run
from paceline.store.corrections.script_state import saved
from paceline.store.increments import AddingStore

Send = Callable[[Member, m.FromStore, tuple[int, ...]], None]


def recall(run: Run, member: Member, asked: m.RecallOptimizer, send: Send) -> None:
    """Tensors go into memory of their own, so the run may go on at once."""
    found = run.store.found if isinstance(run.store, AddingStore) else {}
    recalled, memory = (
        packed_as(*found.pop(member.rank, ({}, {}))) if asked.own else packed_state(run, asked.weights)
    )
    send(member, recalled, (memory.fd,))
    memory.close_fd()


def packed_state(run: Run, weights: bool = False) -> tuple[m.Recalled, Segment]:
    """What it remembers, with the weights if they are asked for; the memory is the caller's to close."""
    tensors, values = saved(run.store)
    if weights:
        tensors |= {f"model.{name}": view for name, view in run.store.named_weights()}
    return packed_as(tensors, values)


def packed_as(tensors: dict[str, Tensor], values: dict[str, Any]) -> tuple[m.Recalled, Segment]:
    """The message, and the memory it speaks of."""
    slots, memory = packed(tensors)
    return m.Recalled(slots, values), memory
