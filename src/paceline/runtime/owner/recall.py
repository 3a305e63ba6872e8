"""The owner's answer to a script that saves its optimizer: what the one remembers that steps for all."""

from __future__ import annotations

from collections.abc import Callable

from paceline.runtime.checkpoints.optimizer_state import packed
from paceline.runtime.messages import workers as m
from paceline.runtime.run.member import Member
from paceline.runtime.run.start import Run

Send = Callable[[Member, m.FromStore, tuple[int, ...]], None]


def recall(run: Run, member: Member, asked: m.Recall, send: Send) -> None:
    """Tensors go into memory of their own, so the run may go on at once."""
    tensors, values = run.store.export()
    if asked.weights:
        tensors |= {f"model.{name}": view for name, view in run.store.named_weights()}
    slots, memory = packed(tensors)
    send(member, m.Recalled(slots, values), (memory.fd,))
    memory.close_fd()
