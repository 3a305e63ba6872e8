"""Whether backward has reached a batch: what it has not reached, as where a script goes on to the next
batch because a loss is not finite, is not in the next gradient and does not count in its mean."""

from __future__ import annotations

from paceline.runtime.worker.model.binding import Binding
from paceline.runtime.worker.optimizer.clipping import Watch


class Reach:
    """One worker's. Nearly always the few parameters that are watched tell; else all gradients do."""

    def __init__(self, binding: Binding, watch: Watch, several: bool) -> None:
        self._binding, self._watch, self._several = binding, watch, several
        self._writes = 0

    def reached(self) -> bool:
        """Whether it has since this was last asked, or since a step."""
        before, self._writes = self._writes, self._binding.writes
        fired, self._watch.fired = self._watch.fired, False
        return fired or self._writes > before

    def stepped(self) -> None:
        """What comes now is for another step."""
        self._watch.fired = False
        self._writes = self._binding.writes if self._several else 0

    def cleared(self) -> None:
        """What was there is gone; of several optimizers' gradients the others' are still there."""
        self._writes = self._binding.writes if self._several else 0
        if not self._several:
            self._watch.fired = False
