"""Notices that a script changes its gradients between backward and step: by clipping them, most often."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LOOKED_AT = 2
"""Parameters whose gradients are watched: what clips, clips all."""


class Watch:
    """Knows what gradients looked like when backward was done with them, until somebody was seen at it."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        some = trained[:: max(1, len(trained) - 1)][:LOOKED_AT]
        self._seen: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.backwards: dict[int, int] = {}
        """How often backward has reached each that is watched since the last step, by its identity."""
        self.fired = False
        """Whether backward has reached one of them, since somebody has set this to False."""
        self._looks = True
        for parameter in some:
            parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: Tensor) -> None:
        self.fired = True
        if parameter.grad is not None and self._looks:
            self._seen[id(parameter)] = parameter, parameter.grad, parameter.grad._version
            self.backwards[id(parameter)] = self.backwards.get(id(parameter), 0) + 1

    def changed(self, scaled: bool) -> bool:
        """Whether a gradient was written to since; told once. `scaled`: a scaler has, once."""
        seen, self._seen = self._seen, {}
        if not self._looks:
            return False
        rose = [now.grad._version - was for now, grad, was in seen.values() if now.grad is grad]
        found = any(each > scaled for each in rose)
        if found:
            self._looks = False
            self.backwards.clear()
        return found
