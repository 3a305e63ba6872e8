"""Which updates the weights contain, told from decisions alone."""

from __future__ import annotations

from paceline.protocols import Fate
from support.drive import Step


class Visible:
    """The version vector: for each active worker, up to which clock its updates are in the weights."""

    def __init__(self) -> None:
        self.applied: dict[int, int] = {}
        self._held: dict[int, int] = {}

    def take(self, step: Step) -> None:
        """Carry out a decision's gradient and flush; what is released now reads the outcome."""
        if step.event == "join":
            self.applied[step.worker] = step.after[step.worker]
        elif step.event in ("died", "finished"):
            self.applied.pop(step.worker)
            self._held.pop(step.worker, None)
        if step.decision.fate is Fate.APPLY:
            self.applied[step.worker] = step.after[step.worker]
        elif step.decision.fate is Fate.HOLD:
            self._held[step.worker] = step.after[step.worker]
        if step.decision.flushed:
            self.applied.update(self._held)
            self._held.clear()
